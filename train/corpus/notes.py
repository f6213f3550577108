"""Text tasks whose request contains the answer: writing from notes, repeating, counting and ordering.

The tasks teach the model to copy words that it has never seen.
"""

from random import Random

from outrider.train.corpus.base import (
    CorpusSplit,
    Exchange,
    cap,
    is_heldout_key,
    join_and,
    pick_template,
    split_entities,
)

_ONSETS = (
    "b",
    "br",
    "c",
    "d",
    "dr",
    "f",
    "g",
    "gr",
    "h",
    "j",
    "k",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "st",
    "t",
    "tr",
    "v",
    "w",
    "z",
)
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "ou")
_CODAS = ("", "n", "r", "l", "s", "m", "nd", "th", "x")
_CITIES = ("a small town", "a large city", "a quiet village", "a busy port", "an old city")
_FAMOUS = (
    "its market", "its old bridge", "its white houses", "its music festival", "its university", "its gardens",
    "its fresh fish", "its castle",
)  # fmt: skip
_WHERE = (
    "by the sea",
    "in the mountains",
    "on a river",
    "in a green valley",
    "at the edge of a desert",
    "near a lake",
)
_PLACE_ASK = (
    "Here are some notes: name {n}, type {t}, location {w}, people {p}, famous for {f}. Write a text.",
    "Make a text of this: name {n}, type {t}, location {w}, people {p}, famous for {f}.",
    "Write a short text from these notes: name {n}, type {t}, location {w}, people {p}, famous for {f}.",
    "Use these facts in a few sentences: name {n}, type {t}, location {w}, people {p}, famous for {f}.",
    "Turn these notes into a paragraph: name {n}, type {t}, location {w}, people {p}, famous for {f}.",
    "Describe the place with these facts: name {n}, type {t}, location {w}, people {p}, famous for {f}.",
    "My notes say: name {n}, type {t}, location {w}, people {p}, famous for {f}. "
    "Please make a readable text of them.",
)  # fmt: skip
_REPEAT = (
    'Say: "{s}"', 'Write this sentence again: "{s}"', 'Repeat after me: "{s}"', 'Repeat this sentence: "{s}"',
    'Please repeat: "{s}"', 'Say this again: "{s}"', 'Copy this sentence: "{s}"',
    'Echo the following words: "{s}"',
)  # fmt: skip
_ORDER = (
    "Sort {s}.", "Can you sort {s}?", "Bring these numbers into order: {s}.", "Sort these numbers: {s}.",
    "Put these numbers in order: {s}.", "Sort from small to large: {s}.", "Order these numbers: {s}.",
    "Arrange the numbers {s} by size.",
)  # fmt: skip
_COUNT = (
    "Numbers from {a} to {b}", "Can you count from {a} to {b}?", "Tell me the numbers from {a} to {b}.",
    "Count from {a} to {b}.", "Please count from {a} to {b}.", "List the numbers from {a} to {b}.",
    "Write the numbers from {a} to {b}.", "Say all numbers between {a} and {b}, both included.",
)  # fmt: skip
_CYCLES = (
    ("day", ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")),
    ("month", (
        "January", "February", "March", "April", "May", "June",
        "July", "August", "September", "October", "November", "December",
    )),
)  # fmt: skip
_NEXT = (
    "Which {k} comes after {x}?",
    "What {k} comes after {x}?",
    "What is the {k} after {x}?",
    "Tell me the {k} that follows {x}.",
)
_SUBJECTS = (
    "The old captain", "My sister", "A young student", "The new teacher", "Our neighbour", "The tall farmer",
    "A friendly nurse", "The clever engineer",
)  # fmt: skip
_VERBS = ("sold", "painted", "found", "repaired", "bought", "lost", "built", "carried")
_OBJECTS = (
    "a red boat", "two blue chairs", "a wooden table", "an old clock", "three small boxes", "a broken radio",
    "a heavy bag", "a silver ring",
)  # fmt: skip
_TIMES = (
    "in the morning",
    "last week",
    "on Friday",
    "after lunch",
    "before the storm",
    "at midnight",
    "in the summer",
    "yesterday",
)


def invented_name(rng: Random, split: CorpusSplit) -> str:
    """Invent a pronounceable name that belongs to the split."""
    while True:
        name = "".join(
            rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
            for _ in range(rng.choice((2, 2, 3)))
        )
        if is_heldout_key(name, 8) == (split is CorpusSplit.HELDOUT):
            return cap(name)


def _place(rng: Random, split: CorpusSplit) -> Exchange:
    n, t, w, f = invented_name(rng, split), rng.choice(_CITIES), rng.choice(_WHERE), rng.choice(_FAMOUS)
    p = f"{rng.randint(1, 99)},{rng.randint(0, 9)}00"
    ask = pick_template(rng, _PLACE_ASK, split).format(n=n, t=t, w=w, p=p, f=f)
    text = (
        f"{n} is {t} {w}. About {p} people live in {n}. "
        f"The place is famous for {f}, and visitors from far away come to {n} every year to see it."
    )
    turns = [(ask, text)]
    if rng.random() < 0.4:
        turns.append(
            rng.choice(
                (
                    (f"How many people live in {n}?", f"About {p} people live in {n}."),
                    (f"What is {n} famous for?", f"{n} is famous for {f}."),
                )
            )
        )
    return turns


def make(rng: Random, split: CorpusSplit) -> Exchange:
    """Generate a text task."""
    kind = rng.random()
    if kind < 0.4:
        return _place(rng, split)
    if kind < 0.6:
        subject = rng.choice(split_entities(_SUBJECTS, split, str))
        s = f"{subject} {rng.choice(_VERBS)} {rng.choice(_OBJECTS)} {rng.choice(_TIMES)}."
        return [(pick_template(rng, _REPEAT, split).format(s=s), s)]
    if kind < 0.75:
        while True:
            numbers = rng.sample(range(1, 60), rng.choice((3, 4, 5)))
            if is_heldout_key(str(sorted(numbers)), 8) == (split is CorpusSplit.HELDOUT):
                break
        ordered = join_and([str(n) for n in sorted(numbers)])
        return [
            (
                pick_template(rng, _ORDER, split).format(s=", ".join(map(str, numbers))),
                f"In ascending order, the numbers are {ordered}.",
            )
        ]
    if kind < 0.88:
        while True:
            a, length = rng.randint(1, 80), rng.randint(5, 15)
            if is_heldout_key(f"count {a} {length}", 8) == (split is CorpusSplit.HELDOUT):
                break
        return [
            (
                pick_template(rng, _COUNT, split).format(a=a, b=a + length),
                ", ".join(str(n) for n in range(a, a + length + 1)) + ".",
            )
        ]
    word, cycle = rng.choice(_CYCLES)
    x = rng.choice(split_entities(cycle, split, str))
    i = cycle.index(x)
    answer = (
        f"The {word} after {x} is {cycle[(i + 1) % len(cycle)]}. "
        f"After that comes {cycle[(i + 2) % len(cycle)]}."
    )
    return [(pick_template(rng, _NEXT, split).format(k=word, x=x), answer)]
