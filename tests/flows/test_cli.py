"""The command line's contract: names, exit codes, keys of machine-readable output."""

import json
import sys

import pytest
import typer

from flows.cli import app, main
from tests.faults.harness import write_recipe
from tests.flows.sample_run import build_sample_run
from tests.tiny import make_tiny_model

# Frozen: scripts call these. Options may be added, never renamed.
COMMANDS = {
    "run": {"--name", "--set", "--root", "--accept-new-code", "--remake", "--verbose"},
    "rerun": {"--from", "--at", "--phase", "--as", "--set", "--root", "--accept-new-code", "--verbose"},
    "validate": {
        "--record",
        "--quarantine",
        "--docs",
        "--recipe",
        "--set",
        "--no-tokenizer",
        "--root",
        "--json",
        "--verbose",
    },
    "bench": {"--root", "--json"},
    "evaluate": {"--recipe", "--phase", "--ema", "--set", "--root", "--json", "--verbose"},
    "rescore": {"--set", "--step", "--phase", "--root", "--json", "--verbose"},
    "score": {"--reward", "--set", "--out", "--root", "--json", "--verbose"},
    "runs": {"--root", "--json"},
    "status": {"--root", "--json"},
    "show": {"--step", "--phase", "--where", "--limit", "--format", "--root"},
    "lineage": {"--root", "--json"},
    "report": {"--out", "--root"},
    "compare": {"--root", "--json"},
    "export": {"--to", "--phase", "--adapter", "--ema", "--root"},
    "prune": {"--yes", "--keep-last", "--keep-every", "--root", "--json"},
    "pin": {"--step", "--phase", "--remove", "--root"},
    "serve": {"--root", "--verbose"},
    "doctor": {"--root", "--json"},
    "fetch-model": {"--root"},
    "config check": {"--set"},
    "config show": {"--set"},
    "config schema": set(),
}


@pytest.fixture
def rft(monkeypatch, capsys):
    """Call the command in this process: (exit code, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["rft", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        return end.value.code, captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    root = tmp_path_factory.mktemp("sample")
    build_sample_run(root, steps=3)
    return root


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return write_recipe(folder, make_tiny_model(folder / "model"))


def commands(group, prefix=""):
    """Full name -> long options, of every command."""
    found = {}
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            found |= commands(command, f"{name} ")
        else:
            long = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
            found[prefix + name] = long - {"--help"}
    return found


def test_commands_and_options_are_frozen():
    assert commands(typer.main.get_command(app)) == COMMANDS


def test_status_has_the_contracts_keys(rft, sample):
    code, out, _ = rft("status", "sample", "--root", sample, "--json")
    status = json.loads(out)
    assert code == 0
    assert {
        "run",
        "state",
        "step",
        "steps",
        "recipe_digest",
        "last_checkpoint",
        "weights_digest",
        "counts",
        "timings",
        "evaluations",
    } <= set(status)
    assert {"step", "policy_version", "suite", "metric", "value", "low", "high", "num_prompts"} <= set(
        status["evaluations"][0]
    )
    assert "median_seconds" in status["timings"]["rollouts"]


def test_lineage_and_runs_have_the_contracts_keys(rft, sample):
    code, out, _ = rft("lineage", "sample", "--root", sample, "--json")
    lineage = json.loads(out)
    assert code == 0
    assert {"ref", "record", "key", "digest", "rows"} <= set(lineage["nodes"][0])
    assert {"from", "to"} <= set(lineage["edges"][0])
    code, out, _ = rft("runs", "--root", sample, "--json")
    assert (code, [run["run"] for run in json.loads(out)]) == (0, ["sample"])


def test_show_prints_whole_rows_as_json_lines(rft, sample):
    code, out, _ = rft(
        "show", "sample", "rewards", "--step", "2", "--where", "reward = 1", "--format", "jsonl", "--root", sample
    )
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert rows
    assert {row["reward"] for row in rows} == {1.0}


def test_report_names_its_file(rft, sample):
    code, out, _ = rft("report", "sample", "--root", sample)
    assert (code, out.strip()) == (0, str(sample / "runs" / "sample" / "report.html"))


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["run", "quikstart"], 2, "did you mean quickstart?"),
        (["run", "quickstart", "--set", "rollout.group_sise=4"], 2, "group_size"),
        (["run", "quickstart", "--set", "algorithm.name=gpro"], 2, "algorithm.name"),
        (["run", "quickstart"], 2, "rft fetch-model smollm2-135m"),
        (["run", "quickstart", "--set", "model.path=/nowhere"], 2, "found nothing at /nowhere"),
        (["run", "quickstart", "--set", "model.path=no such/id of the hub"], 2, "must be a model folder, a fetched"),
        (["run", "quickstart", "--name", "../up"], 2, "a run's name must match"),
        (["run", "x" * 5000], 2, "File name too long"),
        (["run", "quickstart", "--root", __file__], 2, "must be a folder, found a file at"),
        (["status", "nobody"], 2, "nobody"),
        (["export", "nobody", "--to", "x"], 2, "no run 'nobody'"),
        (["show", "sample", "rewards", "--where", "rewrad = 1"], 2, "reward"),
        (["show", "sample", "records"], 2, "RECORD must be one of"),
        (["lineage", "rewards/nothing"], 2, "no table, policy or run 'rewards/nothing'"),
        (["report", "nobody"], 2, "nobody"),
        (["report", "sample", "--out", "."], 2, "--out must be a file, found a folder"),
        (["export", "sample", "--to", __file__], 2, "--to must be a new or empty folder, found a file at"),
        (["validate", "missing.jsonl"], 2, "found no file"),
        (["validate", __file__], 2, "data.source must be"),
        (["rerun", "nobody", "--from", "rewards"], 2, "nobody"),
        (["rerun", "sample", "--from", "rewards", "--as", "../up"], 2, "a run's name must match"),
        (["evaluate", "nobody"], 2, "nobody"),
        (["evaluate", "."], 2, "no run and no model folder '.'"),
        (["config", "check", "nowhere.yaml"], 2, "no recipe 'nowhere.yaml'"),
        (["fetch-model", "gpt-5"], 2, "no model 'gpt-5' can be fetched"),
        (["doctor", "--root", f"{__file__}/below"], 2, "must be a folder, found a file at"),
        (["prune", "sampel"], 2, "did you mean sample?"),
        (["prune", "sample", "--keep-last", "0"], 2, "keep-last"),
        (["pin", "nobody"], 2, "nobody"),
        (["pin", "sample", "--step", "4"], 2, "--step must be a step from 1 to 3 of run sample, got 4"),
        (["pin", "sample", "--remove"], 2, "it has no pin"),
        (["frobnicate"], 2, "No such command"),
        (["run"], 2, "Missing argument"),
    ],
)
def test_mistakes_exit_with_their_code_and_name_the_mend(rft, sample, tmp_path, monkeypatch, arguments, code, said):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")  # nothing here may get as far as a flow
    monkeypatch.setenv("RFT_HOME", str(sample))
    found, _, err = rft(*arguments)
    assert said in err
    assert found == code
    assert "Traceback" not in err


def test_validate_says_what_is_wrong_and_exits_with_3(rft, tiny, tmp_path):
    good = tmp_path / "good.jsonl"
    good.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "2"}\n')
    code, out, _ = rft("validate", good, "--recipe", tiny, "--json")
    assert (code, json.loads(out)["ok"]) == (0, True)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": \n{"answer": "2"}\n')
    code, out, _ = rft("validate", bad, "--recipe", tiny, "--quarantine", tmp_path / "q.jsonl", "--json")
    result = json.loads(out)
    assert code == 3
    assert [row["source_row"] for row in result["first_rows"]] == [2, 3]
    assert [(row["reason"], row["rows"], row["lines"]) for row in result["reasons"]] == [
        ("missing_field", 1, ["bad.jsonl:3"]),
        ("not_json", 1, ["bad.jsonl:2"]),
    ]
    quarantined = [json.loads(line) for line in (tmp_path / "q.jsonl").read_text().splitlines()]
    assert [row["raw"] for row in quarantined] == ['{"prompt": ', '{"answer": "2"}']


def test_config_commands_need_no_run(rft):
    code, out, _ = rft("config", "check", "quickstart")
    assert (code, out.split()[0]) == (0, "ok")
    code, out, _ = rft("config", "show", "quickstart", "--set", "steps=3")
    assert "steps: 3" in out
    code, out, _ = rft("config", "schema")
    assert "AlgorithmSettings" in json.loads(out)["$defs"]


def test_an_interruption_says_how_to_go_on(rft, sample, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("flows.report.build_report", interrupted)
    code, _, error = rft("report", "sample", "--root", sample)
    assert (code, "the same command resumes" in error) == (130, True)


def test_a_path_that_cannot_be_written_is_said_without_a_traceback(rft, sample, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, error = rft("report", "sample", "--root", sample, "--out", tmp_path / "file" / "page.html")
    assert (code, error.count("\n")) == (1, 1)
