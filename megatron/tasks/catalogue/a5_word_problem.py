"""Word problem of A₅, the group of even permutations of five elements."""

from megatron.tasks.word_problem_task import WordProblemTask


class A5WordProblem(WordProblemTask):
    """n of the 60 elements of A₅, the group of even permutations; the answer at each is the product so far."""

    title = "after each of n elements of A₅, the even permutations of five things, the product so far"
    even_only = True
