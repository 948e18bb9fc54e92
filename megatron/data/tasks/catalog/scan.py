"""SCAN: commands in words, and the corresponding actions."""

from functools import cache

import numpy as np

from megatron.data.tasks.task import Array, AutoregressiveTask, TaskBatch

PAD = "·"
VERBS = ("walk", "look", "run", "jump")
SIDES = ("left", "right")
WORDS = [PAD, *VERBS, "turn", *SIDES, "opposite", "around", "twice", "thrice", "and", "after"]
ACTIONS = ["WALK", "LOOK", "RUN", "JUMP", "LTURN", "RTURN"]
SYMBOLS = [*WORDS, *ACTIONS]
LONGEST_COMMAND = 9
"""Maximum number of words in a command."""


class Scan(AutoregressiveTask):
    """`$ · · jump twice and turn left | JUMP JUMP LTURN .`: commands of the SCAN grammar, by number of actions, n.

    A command is a sentence, or two sentences joined by `and` or `after`. A sentence is a phrase, optionally followed by
    `twice` or `thrice`. A phrase is an action, a direction, or an action with a direction, optionally with `opposite`
    or `around`. 16,990 of the 20,910 commands have at most 22 actions. `task_length=22` trains on these, all equally
    often. `--lengths 24,25,26,27,28,30,32,33,36,40,48` evaluates the other 3,920, which is the length split of the
    paper. Commands are left-padded to nine words.

    Vocabulary: the words and a padding word, the actions, and three special tokens.
    """

    title = "the n actions of a command, and a stop token"
    paper = "Lake and Baroni (2018), Generalization without Systematicity"
    note = (
        "The model receives the correct previous actions; exact_match equals the accuracy of greedy decoding. The "
        "paper's score over the 3,920 commands is the mean exact_match over lengths, weighted by number of commands."
    )

    @property
    def num_letters(self) -> int:
        return len(SYMBOLS)

    def describe_unsupported_length(self, length: int) -> str | None:
        if length in list_commands():
            return None
        return f"commands have {', '.join(map(str, sorted(list_commands())))} actions"

    def get_length_weight(self, length: int) -> float:
        return float(len(list_commands()[length][0]))

    def get_sequence_length(self, length: int) -> int:
        return LONGEST_COMMAND + 2 + length

    def sample_batch(self, generator: np.random.Generator, count: int, length: int) -> TaskBatch:
        commands, actions = list_commands()[length]
        rows = generator.integers(len(commands), size=count)
        begin, separator = (np.full((count, 1), token) for token in (self.begin_token, self.separator_token))
        return self.build_batch(np.concatenate([begin, commands[rows], separator], axis=1), actions[rows])


Phrase = tuple[str, str]
"""Words and actions, each separated by spaces."""


def derive_commands() -> list[Phrase]:
    """Generate all commands of the grammar with their actions."""
    turns = [(side, f"{side[0].upper()}TURN") for side in SIDES]
    verbs = [(verb, verb.upper()) for verb in VERBS]
    phrases = list(verbs)
    for side, turn in turns:
        for verb, action in [*verbs, ("turn", "")]:
            phrases += [
                (f"{verb} {side}", f"{turn} {action}"),
                (f"{verb} opposite {side}", f"{turn} {turn} {action}"),
                (f"{verb} around {side}", f"{turn} {action} " * 4),
            ]
    adverbs = {"": 1, " twice": 2, " thrice": 3}
    sentences = [(words + adverb, f"{does} " * times) for words, does in phrases for adverb, times in adverbs.items()]
    pairs = [(first, second) for first in sentences for second in sentences]
    return [
        *sentences,
        *((f"{one} and {other}", does + does_too) for (one, does), (other, does_too) in pairs),
        *((f"{one} after {other}", does_first + does) for (one, does), (other, does_first) in pairs),
    ]


@cache
def list_commands() -> dict[int, tuple[Array, Array]]:
    """Return padded commands, int64 [commands, 9], and their actions [commands, n], by number of actions n."""
    ids = {symbol: number for number, symbol in enumerate(SYMBOLS)}
    by_length: dict[int, tuple[list[list[int]], list[list[int]]]] = {}
    for command, meaning in derive_commands():
        words, actions = command.split(), meaning.split()
        filled = [PAD] * (LONGEST_COMMAND - len(words)) + words
        commands, answers = by_length.setdefault(len(actions), ([], []))
        commands.append([ids[word] for word in filled])
        answers.append([ids[action] for action in actions])
    return {length: (np.array(commands), np.array(answers)) for length, (commands, answers) in by_length.items()}
