"""A server that speaks what trl's `VLLMClient` reads and writes, and makes up its answers; and, for the process that
asks it, the names that the client imports from vLLM, which is not installed."""

import contextlib
import json
import math
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from unittest import mock

CONFIG = {"weight_transfer_config": {"backend": "nccl"}, "model_config": {"logprobs_mode": "processed_logprobs"}}
ANSWERS = {
    "/health": {},
    "/v1/models": {"data": [{"id": "made up"}]},
    "/server_info": {"vllm_config": CONFIG},
    "/get_world_size": {"world_size": 1},
    "/init_weight_transfer_engine": {},
    "/start_weight_update": {},
    "/update_weights": {},
    "/finish_weight_update": {},
    "/reset_prefix_cache": {"success": True},
}
EOS = 1


def completion(prompt, number, updates, most):
    """(tokens, logprobs) of a prompt's completion, after so many updates of the weights."""
    draw = random.Random(repr((prompt, number, updates)))
    length = draw.randint(1, most + 3)  # some are cut short
    tokens = [draw.randint(100, 125) for _ in range(length - 1)] + [EOS]
    return tokens[:most], [-5.7 + draw.uniform(-0.2, 0.2) for _ in tokens[:most]]


class Server(ThreadingHTTPServer):
    """Serves in a thread until its context ends.

    faults: path -> a status that it answers, or a function of the answer, or None to answer nothing.
    """

    daemon_threads = True

    def __init__(self, **faults):
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults = {f"/{path}": fault for path, fault in faults.items()}
        self.requests, self.updates, self.end = [], 0, threading.Event()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def asked(self, path):
        """The bodies of the requests of a path."""
        return [body for at, body in self.requests if at == path]

    def __enter__(self):
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.end.set()
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        path = self.path.partition("?")[0]
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        self.server.requests.append((path, body))
        fault = self.server.faults.get(path, lambda answer: answer)
        if fault is None:
            self.server.end.wait()
        elif isinstance(fault, int):
            self.answer(fault, {"error": "made up"})
        else:
            self.answer(200, fault(self.completions(**body) if path == "/v1/completions" else ANSWERS[path]))
            self.server.updates += path == "/finish_weight_update"

    do_POST = do_GET

    def completions(self, prompt, n, max_tokens, logprobs, **_):
        choices = []
        for ids in prompt:
            for number in range(n):
                tokens, values = completion(ids, number, self.server.updates, max_tokens)
                names = [f"token_id:{token}" for token in tokens]
                tops = [{name: value} for name, value in zip(names, values, strict=True)]
                of_tokens = {"tokens": names, "token_logprobs": values, "top_logprobs": tops}
                of_tokens = None if logprobs is None else of_tokens
                choices.append({"prompt_token_ids": ids, "token_ids": tokens, "logprobs": of_tokens})
        return {"choices": choices}

    def answer(self, status, content):
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def vllm_stands_in(lost=math.inf):
    """Context manager in which trl takes vLLM for installed, and this machine's CPU for a GPU that it broadcasts from.
    Yields what was broadcast: for each update of the weights, name -> tensor.

    lost: the number of the update in which the connection is lost after the first tensor.
    """
    from trl.generation import vllm_client, vllm_generation

    received = []

    def broadcast(iterator, group, src, post_iter_func):
        received.append({})
        for item in iterator:
            if received[-1] and len(received) == lost:
                raise RuntimeError("lost")
            received[-1][item[0]] = post_iter_func(item).clone()

    names = {
        "is_vllm_available": lambda **_: True,
        "get_ip": lambda: "127.0.0.1",
        "open_trainer_endpoint": lambda info: SimpleNamespace(group=SimpleNamespace()),
        "packed_nccl_broadcast_producer": broadcast,
        "_HAS_STATEFUL_TRAINER_ENGINE": True,
        "_HAS_RESET_PREFIX_CACHE_SUCCESS": True,
        "torch": SimpleNamespace(device=lambda *_: SimpleNamespace(type="cuda", index=None)),
    }
    with contextlib.ExitStack() as end:
        end.enter_context(mock.patch.multiple(vllm_client, create=True, **names))
        end.enter_context(mock.patch.object(vllm_generation, "is_vllm_available", names["is_vllm_available"]))
        end.enter_context(mock.patch("urllib3.util.retry.Retry.sleep"))  # between retries, some seconds
        yield received
