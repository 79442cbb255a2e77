"""examples/needle.py learns what it trains, and generation over a cache in parts finds it."""

from pathlib import Path

import pytest

from tests import scripts

EXAMPLE = Path(__file__).parents[2] / "examples" / "needle.py"


@pytest.mark.slow
def test_needles_are_found_at_all_depths_of_the_lengths_that_were_trained(tmp_path):
    ran = scripts.run(2, tmp_path, EXAMPLE, timeout=550)
    assert not ran.failed, ran.stderr[-3000:]
    rows = [line.split() for line in ran.stdout.splitlines() if line.endswith("%")]
    found = {int(tokens): [int(share.rstrip("%")) for share in shares] for tokens, *shares in rows}
    assert [*found] == [64, 128, 256, 512, 1024]
    assert min(share for tokens in (64, 128, 256) for share in found[tokens]) >= 85, found
