"""Arithmetic with intermediate steps, and small word problems written for this corpus."""

from random import Random

from outrider.train.corpus.base import (
    CorpusSplit,
    Exchange,
    is_heldout_key,
    pick_number,
    pick_template,
    split_entities,
)

_NAMES = (
    "Anna", "Ben", "Clara", "David", "Emma", "Finn", "Grace", "Henry", "Ida", "Jack", "Kate", "Leo", "Maria",
    "Noah", "Olivia", "Paul", "Rosa", "Sam", "Tina", "Umar", "Vera", "Will", "Yara", "Zoe", "Amir", "Bella",
    "Carlos", "Dana", "Elif", "Farid",
)  # fmt: skip
_THINGS = (
    "apples", "books", "coins", "pencils", "marbles", "stamps", "cookies", "flowers", "stickers", "shells",
    "cards", "oranges", "buttons", "tickets", "eggs", "toys", "sheep", "chairs", "fish", "dollars", "candles",
    "cups", "balloons", "stones",
)  # fmt: skip
_BINARY = (
    "Find {q}.", "Tell me {q}.", "{q}", "What do I get for {q}?", "What does {q} give?", "The result of {q}?",
    "What is {q}?", "Calculate {q}.", "{q} = ?", "How much is {q}?", "Compute {q}.", "Please calculate {q}.",
    "Can you work out {q}?", "Solve {q}.", "I need the result of {q}.", "Work out the value of {q} for me.",
)  # fmt: skip
_PERCENT = (
    "What is {p}% of {n}?", "Calculate {p}% of {n}.", "How much is {p} percent of {n}?", "Find {p}% of {n}.",
    "I want to know {p} percent of {n}.",
)  # fmt: skip
_AVERAGE = (
    "What is the average of {s}?", "Find the average of {s}.", "Calculate the mean of {s}.",
    "What is the mean of {s}?", "Average these numbers: {s}.",
)  # fmt: skip
_PARITY = (
    "Is {n} even or odd?", "Is {n} an even number?", "Is the number {n} even?",
    "Tell me if {n} is even or odd.", "Would you call {n} even or odd?",
)  # fmt: skip
_STORY = (
    "A farmer has {x} {t} and buys {y} more. Then he sells {z}. How many {t} does he have?",
    "A shop has {x} {t}. It gets {y} more and sells {z}. How many {t} are left?",
    "{a} had {x} {t}, got {y} more from {b} and lost {z}. How many {t} does {a} have left?",
    "{a} collects {x} {t} in the morning and {y} {t} in the afternoon, then gives {z} to {b}. "
    "How many {t} remain?",
    "In a box there are {x} {t}. We put in {y} more and take out {z}. How many {t} are in the box?",
    "{a} has {x} {t}. {b} gives {a} {y} more, and then {a} gives away {z}. How many {t} does {a} have now?",
    "{a} has {x} {t} and finds {y} more. Then {a} loses {z}. How many {t} are left?",
    "{a} buys {x} {t} on Monday and {y} on Tuesday, and gives {z} of them to {b}. "
    "How many {t} does {a} keep?",
    "There are {x} {t} on the table. {a} adds {y}, and {b} takes {z} away. How many {t} are on the table?",
    "{b} lends {a} {y} {t}. Before that, {a} had {x}. Later {a} hands {z} to a friend. "
    "How many {t} remain with {a}?",
)  # fmt: skip
_BOXES = (
    "There are {x} boxes. Each box has {y} {t}. How many {t} are there?",
    "{a} buys {x} packs of {t} with {y} in each pack. How many {t} does {a} buy?",
    "{x} children have {y} {t} each. How many {t} do they have together?",
    "{a} has {x} boxes with {y} {t} in each box. How many {t} does {a} have in total?",
    "Each of {x} bags holds {y} {t}. How many {t} are there in total?",
    "{a} puts {y} {t} on each of {x} plates. How many {t} does {a} use?",
    "A shop packs {y} {t} per crate and ships {x} crates. How many {t} does it ship?",
)  # fmt: skip


def _pair(rng: Random, split: CorpusSplit, op: str, hi_a: int, hi_b: int) -> tuple[int, int]:
    while True:
        a, b = rng.randint(2, hi_a), rng.randint(2, hi_b)
        if is_heldout_key(f"{a}{op}{b}", 8) == (split is CorpusSplit.HELDOUT):
            return a, b


def _binary(rng: Random, split: CorpusSplit) -> Exchange:
    op = rng.choice("++--**")
    if op == "*":
        a, b = _pair(rng, split, "*", 30, 12)
        tens, ones = a - a % 10, a % 10
        if tens and ones:
            how = (
                f"We split {a} into {tens} and {ones}. "
                f"{tens} * {b} = {tens * b} and {ones} * {b} = {ones * b}. "
                f"{tens * b} + {ones * b} = {a * b}. So {a} * {b} = {a * b}."
            )
        else:
            how = f"{a} * {b} = {a * b}."
    elif op == "+":
        a, b = _pair(rng, split, "+", 99, 99)
        tens, ones = a - a % 10 + b - b % 10, a % 10 + b % 10
        how = (
            f"First we add the tens: {a - a % 10} + {b - b % 10} = {tens}. "
            f"Then we add the ones: {a % 10} + {b % 10} = {ones}. "
            f"{tens} + {ones} = {a + b}. So {a} + {b} = {a + b}."
        )
    else:
        a, b = _pair(rng, split, "-", 99, 99)
        a, b = max(a, b), min(a, b)
        between = a - b + b % 10
        how = (
            f"First we take away the tens: {a} - {b - b % 10} = {between}. "
            f"Then we take away the ones: {between} - {b % 10} = {a - b}. "
            f"So {a} - {b} = {a - b}."
        )
    return [(pick_template(rng, _BINARY, split).format(q=f"{a} {op} {b}"), how)]


def _story(rng: Random, split: CorpusSplit) -> Exchange:
    names = split_entities(_NAMES, split, str)
    a = rng.choice(names)
    b = rng.choice([n for n in names if n != a] or ["a friend"])
    t = rng.choice(split_entities(_THINGS, split, str))
    if rng.random() < 0.6:
        x, y = rng.randint(3, 40), rng.randint(2, 30)
        z = rng.randint(1, x + y - 1)
        ask = pick_template(rng, _STORY, split).format(a=a, b=b, t=t, x=x, y=y, z=z)
        how = (
            f"At first there are {x} {t}. Then {y} are added: {x} + {y} = {x + y}. "
            f"Then {z} are taken away: {x + y} - {z} = {x + y - z}. The answer is {x + y - z}."
        )
    else:
        x, y = rng.randint(2, 12), rng.randint(2, 12)
        ask = pick_template(rng, _BOXES, split).format(a=a, t=t, x=x, y=y)
        how = f"There are {x} groups with {y} {t} in each. {x} * {y} = {x * y}. The answer is {x * y}."
    return [(ask, how)]


def make(rng: Random, split: CorpusSplit) -> Exchange:
    """Generate a calculation with its intermediate steps."""
    kind = rng.random()
    if kind < 0.42:
        return _binary(rng, split)
    if kind < 0.72:
        return _story(rng, split)
    if kind < 0.82:
        p = rng.choice((5, 10, 20, 25, 50, 75))
        n = 20 * pick_number(rng, 1, 30, split, "percent")
        ask = pick_template(rng, _PERCENT, split).format(p=p, n=n)
        return [
            (
                ask,
                f"{p}% means {p} out of 100. {n} * {p} / 100 = {n * p / 100:g}. "
                f"So {p}% of {n} is {n * p / 100:g}.",
            )
        ]
    if kind < 0.91:
        k = rng.choice((2, 3, 4))
        numbers = [pick_number(rng, 1, 30, split, "mean") for _ in range(k)]
        numbers[-1] += -sum(numbers) % k
        total = sum(numbers)
        ask = pick_template(rng, _AVERAGE, split).format(s=", ".join(map(str, numbers)))
        mean = total // k
        summands = " + ".join(map(str, numbers))
        return [
            (
                ask,
                f"The sum is {summands} = {total}. There are {k} numbers. {total} / {k} = {mean}. "
                f"The average is {mean}.",
            )
        ]
    n = pick_number(rng, 1, 500, split, "parity")
    word = "even" if n % 2 == 0 else "odd"
    reason = f"its last digit is {n % 10}, and {n % 10} is {word}"
    return [(pick_template(rng, _PARITY, split).format(n=n), f"The number {n} is {word}, because {reason}.")]
