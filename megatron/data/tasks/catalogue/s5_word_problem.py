"""Word problem of S₅, the group of permutations of five elements."""

from megatron.data.tasks.word_problem_task import WordProblemTask


class S5WordProblem(WordProblemTask):
    """n of the 120 elements of S₅, the group of permutations; the answer at each is the product so far."""

    title = "the running product of n elements of S₅, the permutations of five elements"
    even_only = False
