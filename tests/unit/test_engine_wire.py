"""The bytes of both wires: what is asked, and what answers are read as; on answers as they were seen or are documented."""

from __future__ import annotations

import base64
import io
import itertools

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.engines import sglang_wire, vllm_wire
from pipeline.engines.base import ImageItem
from pipeline.engines.progress import Ask, BadAnswer, Progress
from pipeline.engines.routing import from_npy, from_raw, narrowed
from pipeline.engines.transport import Events
from pipeline.engines.wire import SamplingParams

IMAGE = ImageItem("ab" * 32, "image/png", b"\x89PNG")


def npy(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def asked(params: SamplingParams, **more) -> Ask:
    return Ask([1, 2, 3], params, "r", "s", **more)


def begun(prompt=(1, 2, 3)) -> Progress:
    progress = Progress(list(prompt), SamplingParams())
    progress.begin()
    return progress


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n\r"))), st.data())
def test_events_are_the_same_however_the_stream_is_cut(payloads: list[str], data: st.DataObject):
    wanted = [f"x{payload}".encode().strip() for payload in payloads]
    stream = b": comment\n\n" + b"".join(b"event: e\ndata: " + payload + b"\n\n" for payload in wanted)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)))))
    splitter = Events()
    got = [e for a, b in itertools.pairwise((0, *cuts, len(stream))) for e in splitter.feed(stream[a:b])]
    assert got == wanted


def test_a_prompt_is_written_alike_from_a_list_and_from_an_array():
    params = SamplingParams(max_tokens=4, logprobs=None)
    array = np.arange(20, dtype=np.int32)[::2]
    ids = [vllm_wire.request_body(Ask(p, params, "r", "s"), bool) for p in (array, array.tolist())]
    assert ids[0] == ids[1]
    body = orjson.loads(ids[0])
    assert body["token_ids"] == list(range(0, 20, 2))
    assert body["sampling_params"]["logprobs"] == 0
    assert "content_parts" not in body
    assert "routed_experts_prompt_start" not in body["sampling_params"]


def test_an_image_goes_with_its_bytes_unless_it_is_known():
    ask = asked(SamplingParams(), images=[IMAGE], routed_from=2)
    new = orjson.loads(vllm_wire.request_body(ask, lambda digest: False))
    known = orjson.loads(vllm_wire.request_body(ask, lambda digest: digest == IMAGE.digest))
    url = "data:image/png;base64," + base64.b64encode(IMAGE.data).decode()
    assert new["content_parts"] == [{"type": "image_url", "url": url, "uuid": IMAGE.digest}]
    assert known["content_parts"] == [{"type": "image_url", "url": None, "uuid": IMAGE.digest}]
    assert new["sampling_params"]["routed_experts_prompt_start"] == 2


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
@pytest.mark.parametrize("spaced", [False, True])
def test_routed_experts_come_out_narrow_and_unchanged(dtype: type, spaced: bool):
    routing = np.arange(4 * 3 * 2).reshape(4, 3, 2).astype(dtype)
    choice = {
        "token_ids": [7, 8],
        "logprobs": {"content": [{"token_id": 7, "logprob": -1.0}, {"token_id": 8, "logprob": -2.0}]},
        "routed_experts": npy(routing),
        "finish_reason": "stop",
    }
    data = orjson.dumps({"request_id": "r", "choices": [choice]})
    if spaced:
        data = data.replace(b'"routed_experts":', b'"routed_experts": ')
    progress = begun()
    assert vllm_wire.take(data, progress) == ([7, 8], "stop")
    got = progress.generation("stop").routing
    assert got is not None
    assert got.rows.dtype == (np.uint16 if dtype == np.uint16 else np.uint8)
    assert np.array_equal(got.rows, routing)
    with pytest.raises(BadAnswer, match="4 rows of routed experts from 0 for 6 tokens"):
        vllm_wire.take(data, begun((1, 2, 3, 4)))


@pytest.mark.parametrize(
    ("text", "said"),
    [("!!", "not base64"), (base64.b64encode(b"PK\3\4xx").decode(), "no .npy"), (npy(np.zeros(3)), "shape")],
)
def test_routed_experts_that_are_none_are_refused(text: str, said: str):
    with pytest.raises(BadAnswer, match=said):
        from_npy(text.encode())


def test_experts_of_more_than_256_are_never_cut_to_a_byte():
    wide = np.array([[[300, 2]]], np.int32)
    assert narrowed(wide).dtype == np.uint16
    assert narrowed(wide).tolist() == wide.tolist()
    for bad in (np.array([[[70_000]]]), np.array([[[-1]]])):
        with pytest.raises(BadAnswer, match="0 to 65535"):
            narrowed(bad)


def test_base64_longer_than_a_slice_decodes_whole():
    raw = np.arange(700_000, dtype="<i4").reshape(-1, 5, 2) % 200
    assert np.array_equal(from_raw(base64.b64encode(raw.tobytes()), len(raw), 2), raw)
    with pytest.raises(BadAnswer, match="not 11 rows"):
        from_raw(base64.b64encode(raw.tobytes()), 11, 2)


def test_vllm_scores_become_arrays_of_the_likeliest():
    # As vLLM has it: keyed by id, the prompt's own token first, without order after that.
    entries = [
        None,
        {
            "2": {"logprob": -5.0, "rank": 40},
            "9": {"logprob": -0.5, "rank": 1},
            "7": {"logprob": -1.0, "rank": 2},
        },
        {"3": {"logprob": -0.25, "rank": 1}, "8": {"logprob": -2.0, "rank": 2}},
    ]
    data = orjson.dumps({"choices": [], "prompt_logprobs": entries})
    got = vllm_wire.scores(data, [1, 2, 3], 2)
    assert got.logprobs.tolist() == [0.0, -5.0, -0.25]
    assert got.top_ids.tolist() == [[-1, -1], [9, 7], [3, 8]]
    assert got.top_logprobs.tolist() == [[-np.inf, -np.inf], [-0.5, -1.0], [-0.25, -2.0]]
    assert vllm_wire.scores(data, [1, 2, 3], 0).top_ids.shape == (3, 0)
    with pytest.raises(BadAnswer, match="no log-probability for prompt token 2"):
        vllm_wire.scores(data, [1, 2, 4], 2)
    with pytest.raises(BadAnswer, match="3 of 4 tokens"):
        vllm_wire.scores(data, [1, 2, 3, 4], 2)
    with pytest.raises(BadAnswer, match="3 were asked for"):
        vllm_wire.scores(data, [1, 2, 3], 3)


def test_sglang_parameters_have_its_names_and_no_hidden_limit():
    got = sglang_wire.sampling(
        SamplingParams.model_validate({"max_tokens": 5, "seed": 2**40, "stop_token_ids": [4], "min_p": 0.1})
    )
    assert got == {
        "max_new_tokens": 5,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "sampling_seed": 0,
        "stop_token_ids": (4,),
        "min_p": 0.1,
    }
    assert sglang_wire.sampling(SamplingParams())["max_new_tokens"] is None
    body = orjson.loads(sglang_wire.request_body(asked(SamplingParams(top_p=0.9), images=[IMAGE]), True))
    assert body["return_sampling_mask"]
    assert body["return_routed_experts"]
    assert body["image_data"][0].startswith("data:image/png;base64,")


def meta(entries: list, total: int, reason=None, **more) -> bytes:
    info = {"completion_tokens": total, "output_token_logprobs": entries, "finish_reason": reason, **more}
    return orjson.dumps({"text": "", "output_ids": [], "meta_info": {"weight_version": "3", **info}})


ENTRIES = [[-1.0, 7, None], [-2.0, 8, None], [-3.0, 9, None]]


@pytest.mark.parametrize("incremental", [False, True])
def test_sglang_streams_are_read_alike_cumulative_and_incremental(incremental: bool):
    progress, ask, start = begun(), asked(SamplingParams(), stream=True), 0
    for end, reason in ((1, None), (3, {"type": "stop", "matched": 9})):
        shown = ENTRIES[start:end] if incremental else ENTRIES[:end]
        got = sglang_wire.take(meta(shown, end, reason, weight_version=str(end)), progress, ask, None, 0)
        assert got == ([e[1] for e in ENTRIES[start:end]], reason and "stop")
        start = end
    done = progress.generation("stop")
    assert (done.token_ids, done.logprobs, done.versions) == ((7, 8, 9), (-1.0, -2.0, -3.0), (1, 3, 3))


def test_sglang_says_the_samplers_own_log_probabilities_where_tokens_are_left_out():
    ask = asked(SamplingParams(top_k=2))
    masks = {
        "output_token_sampling_mask": [[7, 1], [8], [9]],
        "output_token_sampling_logprobs": [-0.1, -0.2, -0.3],
    }
    progress = begun()
    sglang_wire.take(meta(ENTRIES, 3, {"type": "length"}, **masks), progress, ask, None, 3)
    got = progress.generation("length")
    assert got.logprobs == (-0.1, -0.2, -0.3)
    assert got.candidates == ((7, 1), (8,), (9,))
    with pytest.raises(BadAnswer, match="output_token_sampling_logprobs"):
        sglang_wire.take(meta(ENTRIES, 3, {"type": "length"}), begun(), ask, None, 3)


@pytest.mark.parametrize(
    ("more", "floor", "versions"),
    [
        ({"weight_version": "3"}, 3, (3, 3, 3)),
        ({"weight_version": "4"}, 3, (3, 3, 3)),
        (
            {
                "weight_versions": [
                    {"version": "3", "start": 0, "end": 1},
                    {"version": "4", "start": 1, "end": 3},
                ]
            },
            3,
            (3, 4, 4),
        ),
    ],
    ids=["same", "newer", "spans"],
)
def test_sglang_tokens_are_never_called_newer_than_they_are(more: dict, floor: int, versions: tuple):
    progress = Progress([1, 2, 3], SamplingParams())
    progress.begin(floor)
    sglang_wire.take(
        meta(ENTRIES, 3, {"type": "stop"}, **more), progress, asked(SamplingParams()), None, floor
    )
    assert progress.generation("stop").versions == versions


def test_sglang_routing_has_the_rows_that_were_asked_for():
    routing = np.arange(300, 300 + 4 * 3 * 2, dtype="<i4").reshape(4, 3, 2)
    text = base64.b64encode(routing.tobytes()).decode()
    progress = Progress([1, 2, 3], SamplingParams(), routed_from=1)
    progress.begin()
    done = meta(ENTRIES, 3, {"type": "stop"}, routed_experts=text)
    sglang_wire.take(done, progress, asked(SamplingParams()), 2, 3)
    got = progress.generation("stop").routing
    assert got is not None
    assert (got.start, got.rows.dtype) == (1, np.uint16)
    assert np.array_equal(got.rows, routing)


def test_sglang_ends_that_blame_the_request_are_told_from_aborts():
    ask = asked(SamplingParams())
    assert sglang_wire.take(
        meta(ENTRIES[:1], 1, {"type": "abort", "message": "paused"}), begun(), ask, None, 0
    ) == (
        [7],
        "abort",
    )
    reason = {"type": "abort", "message": "too long", "status_code": 400}
    with pytest.raises(sglang_wire.Rejected) as caught:
        sglang_wire.take(meta([], 0, reason), begun(), ask, None, 0)
    assert caught.value.error == {"code": 400, "message": "too long"}
    assert sglang_wire.error_of(b'{"error": {"message": "bad"}}') == {"code": 400, "message": "bad"}
    assert sglang_wire.error_of(meta([], 0)) is None


def test_sglang_scores_become_the_same_arrays():
    info = {
        "input_token_logprobs": [[None, 1, None], [-5.0, 2, None], [-0.25, 3, None]],
        "input_top_logprobs": [None, [[-0.5, 9, None], [-1.0, 7, None]], [[-0.25, 3, None], [-2.0, 8, None]]],
    }
    got = sglang_wire.scores(meta([], 0, {"type": "length"}, **info), [1, 2, 3], 2)
    assert got.logprobs.tolist() == [0.0, -5.0, -0.25]
    assert got.top_ids.tolist() == [[-1, -1], [9, 7], [3, 8]]
    with pytest.raises(BadAnswer, match="for prompt token 4"):
        sglang_wire.scores(meta([], 0, {"type": "length"}, **info), [1, 2, 4], 2)


SAMPLED = {"token_ids": [7], "logprobs": {"content": [{"token_id": 7, "logprob": -1.0}]}}


@pytest.mark.parametrize(
    "choice",
    [
        {"token_ids": 5},
        {"token_ids": [7], "logprobs": [1]},
        {"token_ids": [7], "logprobs": {"content": [None]}},
        {"token_ids": [7], "logprobs": {"content": [{"rank": 1}]}},
        {"token_ids": [7], "logprobs": {"content": [{"logprob": None}]}},
        {"token_ids": ["7"], "logprobs": {"content": [{"logprob": -1.0}]}},
        {"token_ids": [7.0], "logprobs": {"content": [{"logprob": -1.0}]}},
        {"token_ids": [-7], "logprobs": {"content": [{"logprob": -1.0}]}},
        {"token_ids": [2**31], "logprobs": {"content": [{"logprob": -1.0}]}},
        SAMPLED | {"finish_reason": ["stop"]},
        SAMPLED | {"sampling_mask": 5},
        SAMPLED | {"weight_versions": [{"start": 0}]},
        SAMPLED | {"weight_versions": [3]},
        "7",
    ],
)
def test_an_answer_of_another_form_is_the_engines_fault(choice: object):
    with pytest.raises(BadAnswer):
        vllm_wire.take(orjson.dumps({"choices": [choice]}), begun())


@pytest.mark.parametrize(
    "given",
    [
        {"completion_tokens": "1"},
        {"completion_tokens": 1, "output_token_logprobs": [[-1.0]]},
        {"completion_tokens": 1, "output_token_logprobs": [None]},
        {"completion_tokens": 1, "output_token_logprobs": [[None, 7]]},
        {"completion_tokens": 1, "output_token_logprobs": [[-1.0, -7]]},
        {"completion_tokens": 0, "finish_reason": "stop"},
        {"completion_tokens": 0, "finish_reason": {"type": "abort", "status_code": "broken"}},
    ],
)
def test_an_answer_of_another_form_is_sglangs_fault(given: dict):
    with pytest.raises(BadAnswer):
        sglang_wire.take(orjson.dumps({"meta_info": given}), begun(), asked(SamplingParams()), None, 0)


def test_scores_of_another_form_are_the_engines_fault():
    for entry in ({"2": None}, {"2": {"rank": 1}}, {"2": {"logprob": -1.0}, "many": {"logprob": -2.0}}, [2]):
        with pytest.raises(BadAnswer):
            vllm_wire.scores(orjson.dumps({"prompt_logprobs": [None, entry]}), [1, 2], 2)
    for entries in ([None, None], [None, [None, 2]], [None, "2"]):
        with pytest.raises(BadAnswer):
            sglang_wire.scores(orjson.dumps({"meta_info": {"input_token_logprobs": entries}}), [1, 2], 0)


def test_rows_of_routing_that_do_not_fit_those_before_are_refused():
    progress = begun()
    progress.route(np.zeros((2, 3, 2), np.uint8))
    with pytest.raises(BadAnswer, match="3 layers of 2"):
        progress.route(np.zeros((1, 4, 2), np.uint8))
