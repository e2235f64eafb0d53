"""`benchmarks.agents.workspaces --quick` runs and writes what it promises; what it measures is not judged here."""

import pytest


@pytest.mark.real
@pytest.mark.soak("the other quick runs of this folder")
def test_a_quick_run_measures_commands_forks_and_memory(run_quickly):
    content, printed = run_quickly("agents.workspaces")
    assert {row["part"] for row in content["rounds"]} == {"commands", "fork", "eight forks", "idle"}
    assert len(content["targets"]) == 3
    assert "memory of 100 idle workspaces" in printed
