"""trl's trainers beside a vLLM server, which a stand-in is here: each prompt is sent once for a group of ranks, all
weights once, and whatever the server does wrong is an error on all ranks."""

import contextlib
from unittest import mock

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from ds_seqpar import SequenceParallel, SequenceParallelConfig
from hf_integration import share_accelerator
from hf_integration.trainer import vllm
from tests.hf.vllm_server import CONFIG, Server, vllm_stands_in
from tests.launch import free_port, on_ranks
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
        ("must answer 8 completions", "got 7 of"),
    ),
    "answers nothing": ({"v1/completions": lambda answer: {"choices": []}}, ("asking", "IndexError")),
    "answers no token": (
        {"v1/completions": lambda answer: {"choices": [*answer["choices"][:-1], emptied(answer["choices"][-1])]}},
        ("must answer 8 completions", "got 8 of 0 tokens"),
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
    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = share_accelerator(Accelerator(cpu=True), sp)
    kind = type("OfGroups", (vllm.ServerOfGroups, VLLMGeneration), {})
    prompts, found = [[100 + sp.data_rank, 101]] * 4, {}
    with vllm_stands_in() as received, mock.patch.object(vllm, "SHARE", 0.05):
        for name, url in urls.items():
            try:
                model = torch.nn.Linear(2, 2)
                generation = kind(
                    model, accelerator, None, "server", server_base_url=url, server_timeout=0, max_completion_length=5
                )
                generation.sync_weights()
                answered = generation.generate(prompts, None, 2)
                found[name] = "", answered[1:3]
            except Exception as error:
                found[name] = type(error).__name__, str(error)
    return found, len(received)


def test_whatever_the_server_does_wrong_is_an_error_on_all_ranks():
    with contextlib.ExitStack() as end:
        servers = {name: end.enter_context(Server(**faults)) for name, (faults, _) in FAULTS.items()}
        servers["works"] = end.enter_context(Server())
        urls = {name: server.url for name, server in servers.items()}
        ranks = on_ranks(4, failures, {"is not there": NOT_THERE, **urls})
        (prompts,) = (x["prompt"] for x in servers["works"].asked("/v1/completions"))
    assert prompts == [[100, 101]] * 2 + [[101, 101]] * 2
    expected = {
        "is not there": ("connecting", "ConnectionError", "can't be reached"),
        **{name: words for name, (_, words) in FAULTS.items()},
    }
    for rank, (found, _) in enumerate(ranks):
        for name, words in expected.items():
            kind, sentence = found[name]
            assert kind in ("InputError", "DisagreementError"), (name, rank, sentence)
            assert missing(sentence, *words) == [], (name, rank, sentence)
    answers = [found["works"] for found, _ in ranks]
    assert answers[0] == answers[1] != answers[2] == answers[3]
