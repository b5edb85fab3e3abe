"""The benchmark compares with the fastest configuration of the peer."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from benchmarks.peer_forms import PLAIN, TOKENS, Form, best_form


def test_the_fastest_form_is_found_and_one_that_runs_out_of_memory_is_skipped() -> None:
    def run(form: Form) -> dict[str, float] | None:
        if form.tokens > TOKENS:
            return None  # out of memory
        speed = 100 + 20 * form.mask - 5 * form.rounded_vocabulary + 10 * (form.tokens < TOKENS)
        return {"tokens_per_second": speed}

    best, tried = best_form(run)
    assert best == Form(mask=True, rounded_vocabulary=False, tokens=TOKENS // 2)
    assert next(iter(tried)) == PLAIN
    assert tried[best] == {"tokens_per_second": 130}
    assert tried[Form(mask=True, tokens=2 * TOKENS)] is None
