"""Notes: a kind for programs, a sentence for people."""

from curvestep.files import dump_json
from curvestep.notes import Note

FEW = Note("few-rows", "Only 5 rows.")


def test_a_note_reads_as_its_sentence():
    assert f"{FEW}" == "Only 5 rows."


def test_a_note_keeps_its_kind_on_disk():
    assert dump_json([FEW]) == '[{"kind": "few-rows", "text": "Only 5 rows."}]'
