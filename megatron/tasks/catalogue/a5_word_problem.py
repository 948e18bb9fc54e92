"""The word problem of A₅, the even permutations of five things."""

from megatron.tasks.word_problem_task import WordProblemTask


class A5WordProblem(WordProblemTask):
    """n of the 60 elements of A₅, the even permutations of five things; after each, the product so far."""

    title = "after each of n elements of A₅, the even permutations of five things, the product so far"
    even_only = True
