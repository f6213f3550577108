"""Random JSON schemas whose values are short, so that a small model finishes them."""

from __future__ import annotations

import random
from typing import Any

NAMES = ("name", "id", "tags", "active", "score", "city", "kind", "note", "größe", "a b", "items", "next")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4")


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a schema of at most four levels."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format"]
    if depth < 3:
        kinds += ["object", "object", "array", "anyOf"] * 2
    kind = rng.choice(kinds) if depth else "object"
    return _MAKERS[kind](rng, depth)


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.choice([0, 0, 2])
    return {"type": "string", "minLength": least, "maxLength": least + rng.choice([1, 4, 12])}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randrange(-300, 300)
    bounds = {"minimum": least, "maximum": least + rng.choice([0, 9, 5000])}
    return {"type": "integer"} | bounds | ({"multipleOf": 1} if rng.random() < 0.2 else {})


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": [round(rng.uniform(-9, 9), 2), rng.randrange(100), 1e3]}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample(["red", "green", "blau", 'quo"te', "", 1, -2.5, True, None, ["x", 1]], 4)}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randrange(1, 5))
    made: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }
    return made


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.choice([0, 1, 2])
    most = least + rng.choice([0, 1, 2])
    return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": least, "maxItems": most}


_MAKERS: dict[str, Any] = {
    "string": _string,
    "integer": _integer,
    "number": _number,
    "boolean": lambda rng, depth: {"type": "boolean"},
    "null": lambda rng, depth: {"type": "null"},
    "enum": _enum,
    "const": lambda rng, depth: {"const": rng.choice(["fixed", 42, None, False, {"k": [1]}])},
    "pattern": lambda rng, depth: {"type": "string", "pattern": rng.choice(["^[A-Z]{3}-\\d{2}$", "^a+b?$"])},
    "format": lambda rng, depth: {"type": "string", "format": rng.choice(FORMATS)},
    "object": _object,
    "array": _array,
    "anyOf": lambda rng, depth: {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.choice([2, 3]))]},
}
