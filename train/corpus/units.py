"""Unit conversions. Each answer states the conversion factor."""

from random import Random

from outrider.train.corpus.base import CorpusSplit, Exchange, cap, pick_number, pick_template

# Columns: source, target, factor, divide. 1 source = factor targets; with divide, factor sources = 1 target.
_UNITS = (
    ("kilometers", "meters", 1000, False), ("meters", "centimeters", 100, False),
    ("centimeters", "millimeters", 10, False), ("kilograms", "grams", 1000, False),
    ("liters", "milliliters", 1000, False), ("hours", "minutes", 60, False),
    ("minutes", "seconds", 60, False), ("days", "hours", 24, False), ("weeks", "days", 7, False),
    ("years", "months", 12, False), ("feet", "inches", 12, False), ("yards", "feet", 3, False),
    ("pounds", "ounces", 16, False), ("tons", "kilograms", 1000, False), ("meters", "kilometers", 1000, True),
    ("grams", "kilograms", 1000, True), ("centimeters", "meters", 100, True), ("minutes", "hours", 60, True),
    ("dozens", "pieces", 12, False), ("gallons", "quarts", 4, False), ("decades", "years", 10, False),
    ("centuries", "years", 100, False),
)  # fmt: skip
_ASK = (
    "{n} {f} are how many {t}?", "Turn {n} {f} into {t}.", "Tell me {n} {f} in {t}.",
    "Give me {n} {f} in {t}.", "I need {n} {f} in {t}.", "How much is {n} {f} in {t}?",
    "How many {t} make {n} {f}?", "Write {n} {f} as {t}.", "How many {t} are in {n} {f}?",
    "Convert {n} {f} to {t}.", "How many {t} are {n} {f}?", "What is {n} {f} in {t}?",
    "Please convert {n} {f} to {t}.", "Can you convert {n} {f} into {t}?", "{n} {f} in {t}?",
    "Change {n} {f} to {t}.", "I have {n} {f}. How many {t} is that?", "Express {n} {f} in {t}, please.",
    "If something measures {n} {f}, what is that in {t}?",
)  # fmt: skip
_TEMPERATURE = (
    "Convert {n} degrees Celsius to Fahrenheit.", "What is {n} degrees Celsius in Fahrenheit?",
    "How hot is {n} degrees Celsius in Fahrenheit?", "Please convert {n} °C to °F.",
    "Can you turn {n} degrees Celsius into Fahrenheit?",
    "Give me the Fahrenheit value of {n} degrees Celsius.",
)  # fmt: skip


def _singular(unit: str) -> str:
    return {"feet": "foot", "inches": "inch", "centuries": "century"}.get(unit, unit.removesuffix("s"))


def make(rng: Random, split: CorpusSplit) -> Exchange:
    """Generate a conversion. Sometimes another conversion follows."""
    if rng.random() < 0.15:
        n = 5 * pick_number(rng, 0, 20, split, "celsius")
        f = n * 9 // 5 + 32
        answer = (
            f"To convert Celsius to Fahrenheit, multiply by 9, divide by 5 and add 32. "
            f"{n} * 9 / 5 = {n * 9 // 5}, and {n * 9 // 5} + 32 = {f}. "
            f"So {n} degrees Celsius is {f} degrees Fahrenheit."
        )
        return [(pick_template(rng, _TEMPERATURE, split).format(n=n), answer)]
    source, target, factor, divide = rng.choice(_UNITS)
    k = pick_number(rng, 2, 40, split, source + target)
    n, result, sign = (k * factor, k, "/") if divide else (k, k * factor, "*")
    rule = (
        f"There are {factor} {source} in one {_singular(target)}"
        if divide
        else f"There are {factor} {target} in one {_singular(source)}"
    )
    verb = "divide" if divide else "multiply"
    answer = (
        f"{rule}, so we {verb} by {factor}. {n} {sign} {factor} = {result}. "
        f"So {n} {source} are {result} {target}."
    )
    turns = [(cap(pick_template(rng, _ASK, split).format(n=n, f=source, t=target)), answer)]
    if rng.random() < 0.25 and not divide:
        m = pick_number(rng, 2, 40, split, source + target)
        turns.append(
            (
                f"And {m} {source}?",
                f"{m} * {factor} = {m * factor}. So {m} {source} are {m * factor} {target}.",
            )
        )
    return turns
