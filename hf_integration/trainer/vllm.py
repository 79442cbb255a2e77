"""vLLM in server mode for trl's trainers. The first rank queries the server for all groups of ranks at once.

An error on the first rank is raised on all ranks.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any

from accelerate.utils import broadcast_object_list
from torch import Tensor

from ds_seqpar.base.errors import InputError, SeqParError
from ds_seqpar.core.runtime import groups
from ds_seqpar.guards.agreement import assert_ranks_agree, together
from ds_seqpar.guards.interfaces import gloo_meets_hosts

from ..accelerators import GroupAccelerator
from ..rebinding import rebound
from .rollouts import Behind

CLIENT = "VLLMClient"  # the name of the client's class in trl's file
SERVER = "vLLM in server mode"
SHARE = 0.9  # fraction of the ranks' timeout within which the server must respond


class ServerOfGroups(Behind):
    """Mixin for trl's `VLLMGeneration` that treats groups of ranks as processes."""

    accelerator: GroupAccelerator

    def _init_vllm(self) -> None:
        self._world = groups.control_world(gloo_meets_hosts)
        connect = super()._init_vllm.__func__
        connect = rebound(connect, {CLIENT: functools.partial(_client, connect.__globals__[CLIENT])}, SERVER)
        self._together("connecting to", lambda: connect(self), self.accelerator.wait_for_everyone)

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        self._weights = super()._iter_named_params()
        return self._weights

    def sync_weights(self) -> None:
        self._together("giving weights to", super().sync_weights, lambda: [None for _ in self._weights])

    def generate(self, prompts: list, images: list | None, num_generations: int, profiler: Any = None) -> tuple:
        """Return trl's tuple with the completions for this group's prompts, equal on all ranks of the group."""
        completions = len(prompts) * self.accelerator.num_processes
        names = {
            "gather_object": self.accelerator.gather_objects,
            "broadcast_object_list": functools.partial(self._tell, completions),
        }
        generate = rebound(super().generate.__func__, names, SERVER)
        return self._together("asking", lambda: generate(self, prompts, images, num_generations, profiler))

    def _together(self, action: str, function: Callable[[], Any], join: Callable[[], Any] = lambda: None) -> Any:
        """Return the result of a function that all ranks call.

        Raises an error on every rank if the function fails on any rank.

        Args:
            action: The name of the action for error messages.
            join: A function to call if this rank's function has failed, to join the collective for which the other
                ranks are waiting.
        """
        # ranks have already agreed on a SeqParError
        with together(self._world, f"{action} vLLM's server", passing=(SeqParError,)):
            try:
                return function()
            except SeqParError:
                raise
            except Exception:
                join()
                raise

    def _tell(self, completions: int, answer: list, from_process: int) -> None:
        """Broadcast a response from the server. Raises an error on every rank if the response is incomplete."""
        error = None
        if answer[0] is not None:
            _, ids, logprobs, _ = answer[0]
            lengths = [len(x) for x in ids]
            counted = lengths if self.logprobs is None else [len(x) for x in logprobs or ()]
            if len(ids) != completions or not all(lengths) or counted != lengths:
                error = InputError(
                    f"vLLM's server must answer {completions} completions of a token or more, with a logprob for each "
                    f"token where they are asked for; got {len(ids)} of {min(lengths, default=0)} tokens or more, with "
                    f"{sum(counted)} logprobs for {sum(lengths)} tokens, see its log"
                )
        assert_ranks_agree(self._world, "asking vLLM's server", None, error=error)
        broadcast_object_list(answer, from_process=from_process)


def _client(make: Callable, **settings: Any) -> Any:
    client = _in_time(make)(**settings)
    client.session.request = _in_time(client.session.request)
    # cached, since trl queries the server again on one rank alone
    client.get_server_info = functools.cache(client.get_server_info)
    return client


def _in_time(function: Callable) -> Callable:
    """Wrap a function so that it raises TimeoutError before the other ranks stop waiting."""
    seconds = SHARE * groups.timeout().total_seconds()

    def call(*args: Any, **kwargs: Any) -> Any:
        result: Future = Future()

        def run() -> None:
            try:
                result.set_result(function(*args, **kwargs))
            except Exception as error:
                result.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        if not wait([result], seconds).done:
            raise TimeoutError(f"no answer in {seconds:g} s, since ranks stop waiting after ddp_timeout")
        return result.result()

    return call
