"""Notes: a kind for programs, a sentence for people."""

import pytest

from curvestep.files import dump_json
from curvestep.notes import Note

FEW = Note("few-rows", "Only 5 rows.")


def test_a_note_reads_as_its_sentence():
    assert f"{FEW}" == "Only 5 rows."


def test_a_note_keeps_its_kind_on_disk():
    assert dump_json([FEW]) == '[{"kind": "few-rows", "text": "Only 5 rows."}]'


def test_notes_of_one_kind_and_text_are_one():
    assert len({FEW, Note("few-rows", "Only 5 rows."), Note("few-rows", "Only 6 rows.")}) == 2


def test_a_note_stays_as_it_is():
    with pytest.raises(AttributeError):
        FEW.kind = "many-rows"
