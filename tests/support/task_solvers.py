"""Reference solutions of each task in plain Python, independent of megatron.

A solver takes the symbols of the input and returns those of all outputs, each in its own alphabet.
"""

from itertools import pairwise

Symbols = list[int]


def _expression(symbols: Symbols, alphabet: str) -> str:
    return "".join(alphabet[symbol] for symbol in symbols)


def _read(bits: Symbols) -> int:
    """Return the number whose bits are given, least significant first."""
    return int("".join(map(str, reversed(bits))), 2)


def _ended(number: int, width: int) -> Symbols:
    written = [int(digit) for digit in reversed(f"{number:b}")]
    return [*written, 2, *[0] * width][:width]


def even_pairs(given: Symbols) -> Symbols:
    return [sum(one != other for one, other in pairwise(given)) % 2]


def modular_arithmetic(given: Symbols) -> Symbols:
    return [eval(_expression(given, "01234+-*")) % 5]


def parity_check(given: Symbols) -> Symbols:
    return [given.count(1) % 2]


def cycle_navigation(given: Symbols) -> Symbols:
    place = 0
    for move in given:
        place = {0: [4, 0, 1, 2, 3], 1: [0, 1, 2, 3, 4], 2: [1, 2, 3, 4, 0]}[move][place]
    return [place]


def stack_manipulation(given: Symbols) -> Symbols:
    stack: Symbols = []
    for symbol in given:
        if symbol == 2:
            stack = stack[:-1]
        else:
            stack.append(symbol if symbol < 2 else symbol - 3)
    stack.reverse()
    return [*stack, 2, *[0] * len(given)][: len(given) + 1]


def reverse_string(given: Symbols) -> Symbols:
    return list(reversed(given))


def modular_arithmetic_brackets(given: Symbols) -> Symbols:
    return [eval(_expression(given, "01234+-*()")) % 5]


def solve_equation(given: Symbols) -> Symbols:
    if len(given) < 3:
        return [0]
    left, right = _expression(given, "01234+-()x=").split("=")
    (digit,) = (digit for digit in range(5) if eval(left.replace("x", str(digit))) % 5 == int(right))
    return [digit]


def duplicate_string(given: Symbols) -> Symbols:
    return given * 2


def missing_duplicate(given: Symbols) -> Symbols:
    if given == [1]:
        return [1]
    string = [symbol for symbol in given if symbol != 3]
    hidden, half = string.index(2), len(string) // 2
    return [string[(hidden + half) % (2 * half)]]


def odds_first(given: Symbols) -> Symbols:
    odd_indices = [symbol for index, symbol in enumerate(given) if index % 2 == 1]
    return odd_indices + [symbol for index, symbol in enumerate(given) if index % 2 == 0]


def binary_addition(given: Symbols) -> Symbols:
    if len(given) <= 2:
        return _ended(_read(given), len(given) + 1)
    first = given.index(2)
    return _ended(_read(given[:first]) + _read(given[first + 1 :]), len(given) + 1)


def binary_multiplication(given: Symbols) -> Symbols:
    if len(given) <= 2:
        return [[2], [0, 2]][len(given) - 1]
    first = given.index(2)
    return _ended(_read(given[:first]) * _read(given[first + 1 :]), len(given))


def compute_sqrt(given: Symbols) -> Symbols:
    number, root = _read(given[::-1]), 0
    for place in reversed(range((len(given) + 1) // 2)):  # largest root whose square does not exceed the number
        if (root + 2**place) ** 2 <= number:
            root += 2**place
    return [int(digit) for digit in f"{root:0{(len(given) + 1) // 2}b}"]


def bucket_sort(given: Symbols) -> Symbols:
    return [symbol for bucket in range(5) for symbol in given if symbol == bucket]


SOLVERS = {name: solver for name, solver in vars().copy().items() if callable(solver) and not name.startswith("_")}
SOLVERS = {name: solver for name, solver in SOLVERS.items() if name not in ("pairwise", "Symbols")}
