"""What every command line promises: help that fits a terminal, and one line for a mistake."""

import re

from curvestep.cli import main


def run(capsys, *args):
    """Exit code, standard output and standard error of one command."""
    code = main(args)
    said = capsys.readouterr()
    return code, said.out, said.err


def check_help(capsys, line, command):
    """The help of ``line`` fits a terminal, shows an example, and has words and a default for each option."""
    code, out, _ = run(capsys, *line.split(), "--help")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert f"Example: curvestep {line}" in out
    assert f"\n{command.words[0].upper()}{command.words[1:]}.\n" in out
    options = re.split(r"\n *(?=--[a-z])", out)[1:]
    assert options
    for option in options:
        words = " ".join(option.split())
        assert re.search(r"\(default: .*\)", words), option
        # Besides its name, its choices and its default, every option says in words what it is.
        said = re.sub(r"\{.*?\}|--[a-z-]+|\(default.*", "", words)
        assert len(re.findall(r"[a-z]{2,}", said)) >= 2, option


def check_mistake(capsys, line, words):
    """A wrong command line gets exit code 2 and one line with these words, in any case."""
    code, out, err = run(capsys, *line.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words.lower() in err.lower()
    assert ": argument " not in err  # argparse's own words
    assert err.startswith("curvestep")
    assert len(err.partition("Options:")[0]) < 300  # the list of valid ones is as long as it is
