"""Random JSON schemas such as people write for extraction and for tool calls, made from a seed.

The measured schemas of `bench/prompts/schemas.jsonl` use other property names.
"""

from random import Random
from typing import Any

Schema = dict[str, Any]

NAMES = (
    "label", "heading", "description", "place", "person", "city", "region", "color", "size", "note",
    "comment", "category", "status", "price", "quantity", "total", "score", "rating", "year", "month", "day",
    "hour", "minutes", "distance", "weight", "height", "length", "speed", "temperature", "author", "book",
    "animal", "plant", "food", "drink", "sport", "job", "company", "product", "brand", "material", "reason",
    "example", "detail", "hint", "step", "goal", "tag", "member", "option", "number", "point", "first",
    "second", "third", "next", "last", "location", "owner", "contact", "profile", "setting", "input", "query",
    "limit", "offset", "id", "code", "message", "subject", "body", "greeting", "question", "conclusion",
    "opinion", "evidence", "event", "start", "end", "period", "unit", "advice", "choice", "level", "list",
    "main", "history", "use",
)  # fmt: skip
PREFIXES = ("new", "old", "main", "user", "item", "base", "full", "short", "other", "best", "max", "min")
FLAGS = ("public", "open", "enabled", "visible", "available", "urgent", "done", "valid", "new", "optional")
CHOICES = (
    ("red", "green", "blue", "yellow", "black", "white"),
    ("small", "large", "huge"),
    ("low", "high", "critical"),
    ("open", "closed", "pending", "cancelled"),
    ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday"),
    ("north", "south", "east", "west"),
    ("person", "place", "event", "object"),
    ("yes", "no", "unknown"),
    ("daily", "weekly", "monthly", "yearly"),
    ("spring", "summer", "autumn", "winter"),
    ("search", "lookup", "send_message", "create_event", "get_weather"),
    ("draft", "final", "archived"),
)
MOST_LEVELS = 3
ARRAY, LONG = 0.15, 0.35
UNBOUNDED = 0.1


def random_schema(rng: Random) -> Schema:
    """Return the schema of an object: a record, or a tool call. All random choices come from ``rng``."""
    if rng.random() < 0.2:
        tools = rng.choice(CHOICES)
        name: Schema = {"const": rng.choice(tools)} if rng.random() < 0.5 else _choice(rng)
        return _object({"tool": name, "input": _record(rng, 1)})
    return _record(rng, 0)


def _record(rng: Random, level: int) -> Schema:
    properties: dict[str, Schema] = {}
    for _ in range(rng.randint(1, 5)):
        name = rng.choice(NAMES)
        if rng.random() < 0.25:
            name = f"{rng.choice(PREFIXES)}_{name}"
        kind = rng.random()
        if kind < 0.1:
            name = f"{rng.choice(('is', 'has', 'was'))}_{rng.choice(FLAGS)}"
            properties[name] = {"type": "boolean"}
        elif kind < 0.1 + ARRAY:
            least = rng.randint(0, 2)
            name = name if name.endswith("s") else f"{name}s"
            items = _value(rng, level + 1)
            properties[name] = {
                "type": "array",
                "items": items,
                "minItems": least,
                "maxItems": least + rng.randint(1, 4),
            }
        else:
            properties[name] = _value(rng, level + 1)
    return _object(properties)


def _object(properties: dict[str, Schema]) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _value(rng: Random, level: int) -> Schema:
    kind = rng.random()
    if kind < 0.6:
        return _string(rng)
    if kind < 0.7:
        return _choice(rng)
    if kind < 0.9 or level >= MOST_LEVELS:
        return _number(rng)
    return _record(rng, level)


def _string(rng: Random) -> Schema:
    if rng.random() < UNBOUNDED:
        return {"type": "string"}
    text = {
        "type": "string",
        "maxLength": rng.randint(60, 240) if rng.random() < LONG else rng.randint(6, 48),
    }
    return {"anyOf": [text, {"type": "null"}]} if rng.random() < 0.05 else text


def _choice(rng: Random) -> Schema:
    choices = rng.choice(CHOICES)
    return {"type": "string", "enum": rng.sample(choices, rng.randint(2, len(choices)))}


def _number(rng: Random) -> Schema:
    kind = "integer" if rng.random() < 0.6 else "number"
    if rng.random() < UNBOUNDED:
        return {"type": kind}
    return {"type": kind, "minimum": 0, "maximum": rng.choice((1, 5, 10, 100, 1000, 9999, 100_000))}
