"""Regular expressions for the string formats of JSON schemas, such as dates.

The grammar libraries' own checks of these formats allow a few invalid texts, such as 29 February in every
year.
"""

from __future__ import annotations

_FOURTH_YEAR = "(0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"([0-9]{{2}}{_FOURTH_YEAR}|(00|{_FOURTH_YEAR})00)"
_DATE = (
    r"([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    rf"|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_MINUTES = "([01][0-9]|2[0-3]):[0-5][0-9]"
# A time with second 60 is valid only at midnight UTC, so seconds end at 59.
_TIME = rf"{_MINUTES}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|(\+|-){_MINUTES})"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
}
