"""The words of a script are those that a shell makes of it, as far as the script itself says them."""

import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.orchestrator.configuration.shell import commands_of, is_unresolved

SCRIPTS = [
    "run a=b 'c d' \"e f\" g\\ h",
    "A=1; B=${A:-2} ; C=${D:-$A}x\nrun $A $B $C ${C}y \"${A}z\"",
    "A=x\nexport B=${A}/y C='p q'\nrun a=$B \\\n  b=\"$C\" \\\n  c=${#A}",
    "DATA=(\n  data.files=\"$HOME/a b.parquet\"  # where\n  # nothing\n  'x=[1,2]'\n)\nDATA+=(more)\n"
    "run \"${DATA[@]}\" ${DATA[1]} \"$@\" end",
    "L=$((1024 * 2)); M=$(((L + 1) * 3))\nrun $L $M $(( L/3 ))",
    "P=Qwen/Qwen3-8B\nrun name=${P##*/}-${K:-grpo} ${K:+no} \"\" ''",
    ": \"${N:=8}\"\nrun n=$N",
    "if [ -z \"$X\" ]; then\n  Y=1\nelse\n  Y=2\nfi\nrun $Y",
    "FLAGS=\"--a 1 --b 2\"\nrun $FLAGS \"$FLAGS\"",
    "X=1 Y=2 run x=1",
    "run a=\"['$HOME/x','$HOME/y']\" b=\\$z | tee log.txt",
]  # fmt: skip


@pytest.mark.real
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_shell_makes_the_same_words(script: str, tmp_path: Path) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    defined = 'run() { printf "%s\\0" "$@"; }\n'
    done = subprocess.run(
        [bash, "-c", defined + script], env={"HOME": "/home/me", "PATH": "/usr/bin:/bin"}, capture_output=True,
        check=False, cwd=tmp_path,
    )  # fmt: skip
    assert words_of(script) == done.stdout.decode().split("\0")[:-1]


WORDS = {
    0: ["a=b", "c d", "e f", "g h"],
    1: ["1", "1", "1x", "1xy", "1z"],
    3: ["data.files=/home/me/a b.parquet", "x=[1,2]", "more", "x=[1,2]", "end"],
    4: ["2048", "6147", "682"],
    5: ["name=Qwen3-8B-grpo", "", ""],
    7: ["1"],
    8: ["--a", "1", "--b", "2", "--a 1 --b 2"],
}


@pytest.mark.parametrize("place", WORDS)
def test_words_have_what_the_script_sets(place: int) -> None:
    assert words_of(SCRIPTS[place]) == WORDS[place]


def words_of(script: str) -> list[str]:
    (found,) = [words[1:] for words in commands_of(script, {"HOME": "/home/me"}) if words[0] == "run"]
    return found


def test_what_only_running_it_could_tell_stays_as_it_is_written() -> None:
    script = "T=$(date +%s)\nrun a=$T b=${NOBODY} c=$1 d=${NOBODY%x} e=`hostname` f=$((NOBODY * 2)) g=ok"
    ((_, *words),) = [words for words in commands_of(script, {}) if words[0] == "run"]
    assert [word.partition("=")[0] for word in words if is_unresolved(word)] == ["a", "b", "c", "d", "e", "f"]
    assert words[-1] == "g=ok"
