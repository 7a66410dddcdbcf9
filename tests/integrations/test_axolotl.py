"""Tests the plugin for axolotl through ``axolotl train``: each step against dense losses in float64."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import axolotl_client
import sparse_ce
from forked import PROCESSES, SUPPORT

pytestmark = pytest.mark.skipif(not axolotl_client.there(), reason="axolotl is in .venv/axolotl")

PLUGIN = {"plugins": ["sparse_ce.integrations.axolotl.SparseCEPlugin"]}
KD = {**PLUGIN, "kd_trainer": True, "kd_predicts": "token"}
LORA = dict(adapter="lora", lora_r=4, lora_alpha=8, lora_target_linear=True, lora_mlp_kernel=False,
            lora_qkv_kernel=False, lora_o_kernel=False)
PLAIN = {
    "no plugin": {}, "plugin": PLUGIN, "packed": {**PLUGIN, "sample_packing": True},
    "options, LoRA": {**PLUGIN, **LORA, "sparse_ce": {"z_loss": 0.01, "label_smoothing": 0.1},
                      "gradient_checkpointing": True},
}
DISTILLED = {
    "tokens": {**KD, "kd_ce_alpha": 0.25, "kd_alpha": 0.75, "kd_temperature": 2.0},
    "next, packed": {**KD, "kd_predicts": "next", "sample_packing": True, "kd_ce_alpha": 0.5,
                     "dataloader_num_workers": 1},
    "jsd, evaluated": {**KD, "kd_beta": 0.25, "kd_normalize_topk": True, "kd_temperature": 3.0, "val_set_size": 0.3,
                       "eval_steps": 1},
    "reverse, LoRA": {**KD, **LORA, "kd_beta": 1, "kd_normalize_topk": True, "gradient_checkpointing": True},
}
REFUSED = {  # words of the error
    "two losses": ({**PLUGIN, "chunked_cross_entropy": True}, "chunked_cross_entropy"),
    "their plugin": ({"plugins": [*PLUGIN["plugins"], "axolotl.integrations.kd.KDPlugin"]}, "got axolotl.integrations"),
    "a column": ({**PLUGIN, "sparse_ce": {"row_weight": "weights"}}, "sparse_ce must not hold 'row_weight'"),
    "an unknown option": ({**PLUGIN, "sparse_ce": {"z_los": 1e-4}}, "z_loss, got 'z_los'"),
    "an option of another loss": ({**KD, "sparse_ce": {"z_loss": 1e-4}}, "temperature, got 'z_loss'"),
    "preferences": ({**PLUGIN, "rl": "dpo"}, "rl must be empty"),
    "sharded sequences": ({**PLUGIN, "context_parallel_size": 2}, "context_parallel_size must be 1"),
    "a server": ({**KD, "kd_online_server_base_url": "http://localhost"}, "KDPlugin for a server"),
    "dropped columns": ({**KD, "remove_unused_columns": True}, "remove_unused_columns"),
    "counted tokens": ({**KD, "include_tkps": True}, "include_tkps"),
    "no predicts": ({**KD, "kd_predicts": None}, "kd_predicts must be 'next' or 'token'"),
    "shares": ({**KD, "kd_alpha": 1.0, "kd_ce_alpha": 0.5}, "must sum to 1, got 1.0 and 0.5; divide both by 1.5"),
    "reverse KL": ({**KD, "kd_beta": 1}, "kd_normalize_topk must be true"),
    "temperature": ({**KD, "kd_temperature": -1.0}, "temperature must be"),
}


def ended(folder, trained, refused, *ranks):
    """Runs a process for each of ``ranks``, its environment, and returns the results of the first."""
    (folder / "cases.json").write_text(json.dumps({"trained": trained, "refused": refused}))
    paths = [str(Path(sparse_ce.__file__).parent.parent), str(SUPPORT), os.environ.get("PYTHONPATH")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen([sys.executable, PROCESSES / "axolotl_process.py", folder], cwd=folder, text=True,
                                  stdout=subprocess.DEVNULL, stderr=(folder / f"stderr{i}").open("w"),
                                  env={**environment, **rank}) for i, rank in enumerate(ranks)]
    try:
        codes = [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(codes), (folder / "stderr0").read_text()[-3000:]
    return json.loads((folder / f"results{ranks[0].get('RANK', '')}.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("axolotl")


@pytest.fixture(scope="module")
def results(folder):
    return ended(folder, {**PLAIN, **DISTILLED}, {name: case for name, (case, _) in REFUSED.items()}, {})


@pytest.fixture(scope="module")
def of_two(results, folder):
    """Returns the results of two processes, which read the model and the data of the first."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        shared = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(s.getsockname()[1]),
                      ACCELERATE_USE_CPU="true")
    case = {"two processes": {**DISTILLED["tokens"], "ddp_backend": "gloo"}}
    return ended(folder, case, {}, *({**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"))


@pytest.mark.parametrize("case", [*PLAIN, *DISTILLED])
@pytest.mark.works("axolotl", "one process", "accumulation", "checkpointing", "PEFT")
@pytest.mark.works("axolotl cache", "one process", "accumulation", "checkpointing", "PEFT")
def test_its_steps_are_those_of_dense_losses(case, results):
    check(results["trained"][case], case)


@pytest.mark.works("axolotl cache", "DDP")
def test_the_steps_of_two_processes_are_those_of_dense_losses(of_two):
    check(of_two["trained"]["two processes"], "two processes")


def check(result, case):
    losses, expected = result["losses"]
    assert losses == pytest.approx(expected, rel=1e-5) and len(set(losses)) == 3
    difference, change = result["weights"]
    assert difference < 1e-5 * change
    assert result["fused"] == int(case != "no plugin")
    assert (result["sequences in a row"] > 1) == ("packed" in case)
    assert len(result["evaluated"]) == (4 if "evaluated" in case else 0)


def test_the_plugin_does_not_change_the_training(results):
    losses, expected = (results["trained"][case]["losses"][0] for case in ("plugin", "no plugin"))
    assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_does_not_support_is_refused_when_the_configuration_is_read(case, results):
    assert "sparse_ce: " in results["refused"][case] and REFUSED[case][1] in results["refused"][case]


def test_the_examples_of_docstrings_run(results):
    failed, run = results["examples"]
    assert failed == 0 and run >= 3
