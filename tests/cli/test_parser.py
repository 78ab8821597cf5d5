"""Options of a command: values by name, one line for a mistake, defaults as they are typed."""

import pytest

from curvestep.cli.parser import INTEGER, NUMBER, Command, Parser, UsageError, as_typed, one_of


@pytest.fixture
def parser():
    """The parser of a command with an option of each kind."""
    made = Parser("curvestep test", "Test options.", example="a.txt", names="FILE ...")
    made.positional("FILE", "Files to read", kind=one_of("a.txt", "b.txt"))
    made.option("--lr", "Learning rate", default=0.1, kind=NUMBER)
    made.option("--batch-size -b", "Samples, 100% of them", default=8, kind=INTEGER)
    made.option("--folder", "Where it goes", shown="runs/<name>")
    made.flag("--quiet", "Say nothing")
    return made


def test_values_have_their_kinds_and_defaults(parser):
    chosen = parser.read(["a.txt", "b.txt", "--lr", "1e-3", "--batch_size=20", "--quiet"])
    assert vars(chosen) == {
        "help": False, "FILE": ["a.txt", "b.txt"], "lr": 1e-3, "batch_size": 20, "folder": "", "quiet": True,
    }  # fmt: skip
    assert vars(parser.read(["-b", "3"])) | {"lr": 0.1} == {
        "help": False, "FILE": [], "lr": 0.1, "batch_size": 3, "folder": "", "quiet": False,
    }  # fmt: skip


WRONG = {
    "--lr fast": "--lr: needs a number, got 'fast'",
    "--batch-size 1.5": "--batch-size/-b: needs a whole number",
    "c.txt": "FILE: needs one of a.txt, b.txt, got 'c.txt'",
    "--leraning-rate 1": "there is no option --leraning-rate",
    "--learning-rate 1": "there is no option --learning-rate. Did you mean --lr?",
    "--batch 1": "there is no option --batch. Did you mean --batch-size?",
    "--foldr x": "there is no option --foldr. Did you mean --folder?",
    "--quiet=yes": "--quiet: ignored explicit argument",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_mistake_names_the_option_and_what_it_needs(parser, line):
    with pytest.raises(UsageError) as caught:
        parser.read(line.split())
    assert WRONG[line] in str(caught.value)
    assert str(caught.value).endswith("See curvestep test --help.")


def test_help_shows_each_default_as_it_is_typed(parser, capsys):
    with pytest.raises(SystemExit):
        parser.read(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("Samples, 100% of them (default: 8)", "(default: runs/<name>)", "(default: off)"):
        assert words in shown
    assert "Example: curvestep test a.txt" in shown


def test_defaults_are_written_as_they_are_typed():
    assert [as_typed(value) for value in ((0.5, 1.0), (), 1e-5, True, "x")] == [
        "0.5 1", "none", "1e-05", "true", "x",
    ]  # fmt: skip


def test_a_command_hands_its_parser_to_its_function():
    def function(parser, args):
        assert (parser.prog, args) == ("curvestep name", ["a"])
        return 3

    assert Command(function, "do something", "a", "FILE").run("name", ["a"]) == 3
