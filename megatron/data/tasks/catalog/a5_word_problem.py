"""Word problem of A₅, the group of even permutations of five elements."""

from megatron.data.tasks.catalog.s5_word_problem import S5WordProblem


class A5WordProblem(S5WordProblem):
    """n of the 60 elements of A₅, the group of even permutations; the answer at each is the product so far."""

    title = "the running product of n elements of A₅, the even permutations of five elements"
    even_only = True
