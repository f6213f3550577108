"""The fields of both APIs are those of the table of options, and an option of the table reaches both APIs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from pydantic import ValidationError
from support.suite.scripts import import_script

from outrider.services.gateway.options.rows import FieldGroup, RequestOption, grpc, option, rest
from outrider.services.gateway.options.table import OPTIONS, grpc_path

WARMTH = option(
    "warmth",
    "How warm the answer is, 0 to 9.",
    grpc("SamplingOptions.warmth", "optional uint32", 90, "0 is cold."),
    rest("warmth", "int", FieldGroup.SAMPLING, bounds="ge=0, le=9"),
    rest("heat", "int", FieldGroup.CHAT, about="Another name of `warmth`."),
)


SCRIPT = import_script("option_sources")
PAGE = import_script("grpc_fields")


def test_the_protos_and_the_fields_are_current() -> None:
    assert SCRIPT.main(["--check"]) == 0, "run: python scripts/option_sources.py"


def test_the_page_is_current() -> None:
    assert PAGE.main(["--check"]) == 0, "run: python scripts/grpc_fields.py"


def test_changed_files_are_found_and_corrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    originals = {path.name: path.read_text() for path in (*SCRIPT.PROTOS, SCRIPT.FIELDS / "sampling.py")}
    changes = {
        "common.proto": ("optional float top_p = 3;", "optional double top_p = 4;"),
        "sampling.py": ("top_p", "p"),
    }
    for name, text in originals.items():
        changed = text.replace(*changes.get(name, ("", "")))
        (tmp_path / name).write_text(changed)
        assert (changed != text) == (name in changes)
    monkeypatch.setattr(SCRIPT, "ROOT", tmp_path)
    monkeypatch.setattr(SCRIPT, "FIELDS", tmp_path)
    monkeypatch.setattr(SCRIPT, "PROTOS", [tmp_path / path.name for path in SCRIPT.PROTOS])
    assert SCRIPT.main(["--check"]) == 1
    found = capsys.readouterr().out
    assert [name in found for name in originals] == [name in changes for name in originals]
    assert SCRIPT.main([]) == 0
    assert {name: (tmp_path / name).read_text() for name in originals} == originals
    assert SCRIPT.main(["--check"]) == 0


def test_an_option_of_the_table_appears_in_both_apis(tmp_path: Path) -> None:
    options = (*OPTIONS, WARMTH)
    text = SCRIPT.proto(SCRIPT.PROTOS[0].read_text(), options)
    body = re.search(r"^message SamplingOptions \{\n(.*?)^\}", text, re.DOTALL | re.MULTILINE)
    assert body
    assert body[1].endswith("  // 0 is cold.\n  optional uint32 warmth = 90;\n")
    assert grpc_path(WARMTH.grpc[0]) == "options.sampling.warmth"

    path = tmp_path / "sampling_with_warmth.py"
    path.write_text(SCRIPT.module("sampling", options))
    fields = runpy.run_path(str(path))["SamplingFields"]
    assert fields.model_fields["warmth"].description == "How warm the answer is, 0 to 9."
    assert fields.model_validate({}).warmth is None
    assert fields.model_validate({"warmth": 9}).warmth == 9
    with pytest.raises(ValidationError, match="less than or equal to 9"):
        fields.model_validate({"warmth": 10})
    heat = '    heat: int | None = Field(default=None, description="Another name of `warmth`.")\n'
    assert heat in SCRIPT.module("openai", options)


@pytest.mark.parametrize("field", [WARMTH.grpc[0], WARMTH.rest[0]])
def test_an_option_of_one_api_needs_a_reason(field: object) -> None:
    with pytest.raises(ValueError, match="warmth needs fields in REST and in gRPC"):
        option("warmth", "How warm the answer is.", field)
    assert option("warmth", "How warm the answer is.", field, only="a reason").only


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (grpc("SamplingOptions.warmth", "optional uint32", 3), "same number"),
        (grpc("SamplingOptions.top_p", "optional uint32", 90), "same name"),
    ],
)
def test_a_grpc_field_is_listed_once(more: object, message: str) -> None:
    added: RequestOption = option("warmth", "How warm the answer is.", more, only="a reason")
    with pytest.raises(ValueError, match=message):
        SCRIPT.proto("", (*OPTIONS, added))


def test_a_rest_field_is_listed_once() -> None:
    added = option("warmth", "Warm.", rest("top_p", "int", FieldGroup.SAMPLING), only="a reason")
    with pytest.raises(ValueError, match="same name"):
        SCRIPT.module("sampling", (*OPTIONS, added))


def test_a_type_needs_a_module() -> None:
    added = option("warmth", "Warm.", rest("warmth", "Warmth", FieldGroup.SAMPLING), only="a reason")
    with pytest.raises(ValueError, match="TYPES: Warmth"):
        SCRIPT.module("sampling", (*OPTIONS, added))


def test_a_long_line_is_broken() -> None:
    long = option("warmth", "word " * 30 + "end.", *WARMTH.rest[:1], only="a reason")
    lines = SCRIPT.module("sampling", (*OPTIONS, long)).splitlines()
    assert max(map(len, lines)) <= SCRIPT.MAX_COLUMNS
