"""`jaxcoll completion`: what a shell offers."""

import subprocess

import pytest

from jaxcoll.cli.main import COMMANDS, main


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["completion", "bash"]) == 0
    path = tmp_path_factory.mktemp("completion") / "script"
    path.write_text(out.getvalue())
    return path


def offered(script, *words):
    """What bash offers for the last of `words`."""
    typed = " ".join(f"'{word}'" for word in ("jaxcoll", *words))
    code = (
        f"source {script}; COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _jaxcoll; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("",), [*COMMANDS, "--help", "--version"]),
        (("pl",), ["plan"]),
        (("plan", "--to"), ["--topology"]),
        (("plan", "--reduce-op", ""), ["mean", "sum"]),
        (("inspect", "--platform", "g"), ["gpu"]),
        (("inspect", "--json", ""), []),  # a file, which the shell itself completes
        (("demo", "dig"), ["digits"]),
        (("completion", "z"), ["zsh"]),
    ],
)
def test_bash_offers_commands_flags_and_their_values(script, words, found):
    assert offered(script, *words) == found


def test_every_flag_of_every_command_is_offered(script, capsys):
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        usage = capsys.readouterr().out
        flags = set(offered(script, command, "--"))
        assert {word for word in usage.replace(",", " ").split() if word in flags} == flags
        assert "--help" in flags


def test_the_script_for_zsh_is_that_for_bash_behind_its_own_first_line(script, capsys):
    assert main(["completion", "zsh"]) == 0
    first, _, rest = capsys.readouterr().out.partition("\n")
    assert first == "autoload -U +X bashcompinit && bashcompinit"
    assert rest == script.read_text()
