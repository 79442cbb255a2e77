"""trl's trainers beside a vLLM server, which a stand-in is here: each prompt is sent once for a group of ranks, all
weights once, and whatever the server does wrong is an error on all ranks."""

import contextlib
import itertools
import math
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator

from ds_seqpar import SequenceParallel, SequenceParallelConfig
from hf_integration import share_accelerator
from hf_integration.trainer import vllm
from tests.hf.trainers import build, case, differences, split, untimed
from tests.hf.vllm_server import CONFIG, Server, vllm_stands_in
from tests.launch import free_port, on_ranks, on_trainer_ranks
from tests.words import missing

NOT_THERE = f"http://127.0.0.1:{free_port()}"
# what the server does wrong -> its faults, and words of the sentence
FAULTS = {
    "is not ready": ({"health": 503}, ("connecting", "TimeoutError", "ddp_timeout")),
    "takes no weights": (
        {"server_info": lambda _: {"vllm_config": {**CONFIG, "weight_transfer_config": None}}},
        ("connecting", "has no weight-transfer engine"),
    ),
    "fails before the weights": ({"start_weight_update": 500}, ("giving weights", "RetryError", "500")),
    "fails at the weights": ({"update_weights": 404}, ("giving weights", "404", "made up")),
    "fails after the weights": ({"reset_prefix_cache": 500}, ("giving weights", "500")),
    "fails": ({"v1/completions": 500}, ("asking", "500")),
    "does not answer": ({"v1/completions": None}, ("asking", "TimeoutError", "3 s")),
    "answers too few": (
        {"v1/completions": lambda answer: {"choices": answer["choices"][:-1]}},
        ("must answer 4 completions", "got 3 of"),
    ),
    "answers nothing": ({"v1/completions": lambda answer: {"choices": []}}, ("asking", "IndexError")),
    "answers no token": (
        {"v1/completions": lambda answer: {"choices": [*answer["choices"][:-1], emptied(answer["choices"][-1])]}},
        ("must answer 4 completions", "got 4 of 0 tokens"),
    ),
    "answers no logprobs": (
        {"v1/completions": lambda answer: {"choices": [{**x, "logprobs": None} for x in answer["choices"]]}},
        ("logprob for each token", "with 0 logprobs"),
    ),
}


def emptied(choice):
    return {**choice, "token_ids": [], "logprobs": {"tokens": [], "token_logprobs": [], "top_logprobs": []}}


def failures(urls):
    """What each of the servers' faults is on this rank: (type, sentence)."""
    from trl.generation.vllm_generation import VLLMGeneration

    sp = SequenceParallel(SequenceParallelConfig(size=2))
    accelerator = share_accelerator(Accelerator(cpu=True), sp)
    kind = type("OfGroups", (vllm.ServerOfGroups, VLLMGeneration), {})
    ids, found = [[100, 101]] * 4, {}
    with vllm_stands_in():
        for name, url in urls.items():
            waits = "TimeoutError" in FAULTS.get(name, ({}, ()))[1]  # the others answer when the machine lets them
            try:
                with mock.patch.object(vllm, "SHARE", 0.05 if waits else 0.5):
                    generation = kind(
                        torch.nn.Linear(2, 2), accelerator, None, "server",
                        server_base_url=url, server_timeout=0, max_completion_length=5,
                    )  # fmt: skip
                    generation.sync_weights()
                    found[name] = generation.generate(ids, None, 2)[1:3]
            except Exception as error:
                found[name] = type(error).__name__, str(error)
    return found


def test_whatever_the_server_does_wrong_is_an_error_on_all_ranks():
    with contextlib.ExitStack() as end:
        servers = {name: end.enter_context(Server(**faults)) for name, (faults, _) in FAULTS.items()}
        servers["works"] = end.enter_context(Server())
        urls = {name: server.url for name, server in servers.items()}
        ranks = on_ranks(2, failures, {"is not there": NOT_THERE, **urls})
    sentences = {name: words for name, (_, words) in FAULTS.items()}
    sentences["is not there"] = "connecting", "ConnectionError", "can't be reached"
    for (name, words), rank in itertools.product(sentences.items(), range(2)):
        kind, sentence = ranks[rank][name]
        assert kind == ("InputError", "DisagreementError")[rank], (name, sentence)
        assert missing(sentence, *words) == [], (name, rank, sentence)
    assert ranks[0]["works"] == ranks[1]["works"]
    assert [len(x) for x in ranks[0]["works"]] == [4, 4]


def own_noise(**parts):
    return {"between": (), **parts}


def with_adapters():
    return own_noise(peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


IN_PARTS = {"deepspeed_changes": split()}
CASES = {
    "grpo, in parts": case("GRPO", own_noise, **IN_PARTS, vllm_importance_sampling_mode="token_truncate"),
    "rloo": case("RLOO", own_noise, beta=0.0, num_iterations=2, max_steps=3),
    "grpo, adapters in parts": case(
        "GRPO", with_adapters, **IN_PARTS, learning_rate=3e-2, eval_strategy="steps", eval_steps=1
    ),
    "on the ranks": case("GRPO", own_noise, vllm_mode="colocate"),
}


def trained(folder, name, size, url, lost=math.inf):
    """(what is logged, the completions of the last steps, the weights of each update). lost: as of `vllm_stands_in`."""
    how = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": 0}
    with vllm_stands_in(lost) as received:
        trainer = build(folder, {**how, **CASES[name]}, size, 4 * dist.get_world_size() // (size or 1))
        trainer.train()
    return untimed(trainer.state.log_history), [*trainer._logs["completion"]], received


def runs(folder, size, urls):
    return {name: trained(f"{folder}/{name}", name, size, url) for name, url in urls.items()}


@pytest.mark.parametrize(
    ("names", "ranks"),
    [(("grpo, in parts",), 2), pytest.param(tuple(CASES)[:3], 4, marks=pytest.mark.slow)],
)
def test_requests_and_all_that_is_logged_are_trls(names, ranks, tmp_path):
    with contextlib.ExitStack() as end:
        asked = [{name: end.enter_context(Server()) for name in names} for _ in range(2)]
        urls = [{name: server.url for name, server in servers.items()} for servers in asked]
        plain = on_trainer_ranks(ranks // 2, runs, tmp_path / "plain", None, urls[0], timeout=250)
        shared = on_trainer_ranks(ranks, runs, tmp_path / "shared", 2, urls[1], timeout=250)
    for name in names:
        # what the server is, is asked once
        requests = [[x for x in servers[name].requests if x[0] != "/server_info"] for servers in asked]
        assert len(asked[1][name].asked("/v1/completions")) > 1
        assert requests[0] == requests[1], name
        for rank, found in enumerate(shared):
            history, completions, _ = found[name]
            trls, of_trl, _ = plain[rank // 2][name]
            assert differences(trls, history, within=1e-5) == [], (name, rank)
            assert completions == of_trl
        updates, of_trl = shared[0][name][2], plain[0][name][2]
        assert len(updates) == len(of_trl) > 1
        for update, other in zip(updates, of_trl, strict=True):
            assert update.keys() == other.keys()
            for key, weights in update.items():
                torch.testing.assert_close(weights, other[key], rtol=1e-3, atol=1e-4)


def failing(folder, name, url):
    """What a Trainer raises whose weights are lost on their way to the server, if it has come so far."""
    try:
        return trained(folder, name, 2, url, lost=2)
    except Exception as error:
        dist.barrier()  # no rank is still in a gather
        return type(error).__name__, str(error)


def test_a_vllm_on_the_ranks_is_refused(tmp_path):
    for kind, sentence in on_trainer_ranks(2, failing, tmp_path, "on the ranks", ""):
        assert kind == "ConfigError"
        assert missing(sentence, "vLLM in server mode", "vllm_mode='colocate'") == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo, in parts", "grpo, adapters in parts"])
def test_weights_that_are_lost_halfway_are_an_error_on_all_ranks_of_zero_3(name, tmp_path):
    with Server() as server:
        kinds, sentences = zip(*on_trainer_ranks(2, failing, tmp_path, name, server.url), strict=True)
    assert kinds == ("InputError", "DisagreementError")
    assert all(missing(x, "giving weights", "RuntimeError", "lost") == [] for x in sentences)
