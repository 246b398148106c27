"""The server's queue: batches, fair turns, cancellation, limits."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest
from hypothesis import given, strategies

import tones
from imputer.audio import windows
from imputer.decoding import Options
from imputer.languagemodel import fusion
from imputer.server import runners
from imputer.server.batcher import Batcher
from imputer.server.failures import Failure
from imputer.server.jobs import Batch, Job, Window
from imputer.server.metrics import Metrics
from imputer.server.runners import LocalRunner
from imputer.server.scheduling import BATCH_COST_SECONDS, FairClock, choose
from imputer.server.settings import Settings
from serving import (
    TEXT,
    ask,
    check_envelope,
    connected,
    figure,
    get,
    held,
    long_speech,
    raw_request,
    receive_all,
    serving,
    wait_until,
    wav,
)


def test_many_clients_get_their_own_answers(running):
    address, _ = running
    random = np.random.default_rng(1)
    texts = [tones.sentence(random, int(n)) for n in random.integers(1, 7, 48)]
    before = figure(address, "imputer_batch_size_count")
    with ThreadPoolExecutor(16) as pool:
        answers = list(
            pool.map(
                lambda item: ask(address, wav(tones.speak(item[1], item[0])[0])).json()["text"],
                enumerate(texts),
            )
        )
    assert answers == texts
    assert figure(address, "imputer_batch_size_count") - before < len(texts), "nothing was batched"


def test_bad_uploads_do_not_hurt_others(running):
    address, _ = running
    good, bad = wav(), [b"", b"junk", wav()[:3000], wav(np.full(9000, np.nan, np.float32), subtype="FLOAT")]
    contents = [bad[n // 2 % len(bad)] if n % 2 else good for n in range(40)]
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda content: ask(address, content), contents))
    for n, answer in enumerate(answers):
        assert answer.status_code in (400, 415) if n % 2 else answer.json()["text"] == TEXT


def batcher_of(listener, **settings):
    chosen = Settings(models=("tones",), **settings)
    return Batcher([LocalRunner({"tones": listener}, chosen)], chosen, Metrics())


def queued(batcher, *windows, size=4):
    """A job of these windows, all of them decoded."""
    job = Job("tones", Options(size), tones.RATE, lambda job: iter(()))
    batcher.enrol(job)
    for samples in windows:
        batcher.push(job, samples)
    batcher.end_input(job)
    return job


def silence(seconds):
    return np.zeros(int(seconds * tones.RATE), np.float32)


def test_one_that_breaks_the_batch_breaks_alone(listener):
    """Samples that make the network give NaN: that one is refused, the others are answered."""
    good, _ = tones.speak(TEXT, 500)
    broken = np.full(len(good), np.inf, np.float32)

    async def run():
        batcher = batcher_of(listener)
        jobs = [queued(batcher, samples) for samples in (good, broken, good)]
        await asyncio.to_thread(batcher.start)
        results = await asyncio.gather(*(job.done for job in jobs), return_exceptions=True)
        await asyncio.to_thread(batcher.stop)
        return results

    first, second, third = asyncio.run(run())
    assert isinstance(second, Failure) and second.status == 400 and "NaN" in second.message
    for (decoded,) in (first, third):
        assert listener.transcript(decoded, 1.0).text == TEXT


@given(strategies.data())
def test_choice_of_a_batch(data):
    """The window whose turn it is always goes; others have its model and options; padding stays in bounds."""
    kinds = [("a", Options(8)), ("a", Options(4)), ("a", Options(8, trace=True)), ("b", Options(8))]
    seconds = strategies.floats(0.04, 24.0)
    spec = data.draw(
        strategies.lists(
            strategies.tuples(strategies.sampled_from(kinds), seconds, strategies.floats(0, 9)),
            min_size=1,
            max_size=30,
        )
    )
    items = data.draw(strategies.integers(1, 16))
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        waiting = [
            Window(
                Job(*kind, 100, lambda job: iter(()), loop=loop, tag=tag),
                0,
                np.zeros(int(length * 100) + 1),
                0.0,
            )
            for kind, length, tag in spec
        ]
    batch = choose(waiting, items, 64.0)
    first = min(waiting, key=lambda window: window.turn(0.0))
    assert batch[0] is first and len(batch) <= items and len(set(map(id, batch))) == len(batch)
    alike = {(window.job.model, window.job.options) for window in batch}
    assert alike == {(first.job.model, first.job.options)}
    padded = max(window.seconds for window in batch) * len(batch)
    waste = padded - sum(window.seconds for window in batch)
    assert len(batch) == 1 or (padded <= 64.0 and waste <= (len(batch) - 1) * BATCH_COST_SECONDS + 1e-6)


# Fair turns. A window costs its duration in seconds here, and nothing else counts.


def served(batcher, arrivals, until, done=lambda job: None):
    """The order in which jobs are served if ``arrivals`` says who comes when, one window at a time."""
    now, order = 0.0, []
    batcher.seconds_per_cost = 1 / Job("a", Options(4), 1, lambda job: iter(())).cost(1.0)
    while now < until:
        for at, enter in list(arrivals):
            if at <= now:
                arrivals.remove((at, enter))
                enter()
        if not batcher.waiting:
            now += 0.1
            continue
        batch = batcher._next_turn()
        cost = batch.windows[0].seconds
        now += cost
        order.append((now, batch.windows[0].job))
        with batcher.condition:
            batcher._charge(batch, cost)
            job = batch.windows[0].job
            if not any(window.job is job for window in batcher.waiting):
                batcher.jobs.discard(job)
                done(job)
    return order


def test_a_short_recording_passes_the_windows_of_a_long_one(listener):
    """It waits for the window that runs, and for no other."""

    async def run():
        batcher = batcher_of(listener, batch_items=1)
        long = queued(batcher, *[silence(20)] * 50)
        shorts = []
        arrivals = [(at, lambda: shorts.append(queued(batcher, silence(3)))) for at in (1, 130, 131, 400)]
        order = served(batcher, arrivals, 1000)
        return long, shorts, order

    long, shorts, order = asyncio.run(run())
    ends = {job: now for now, job in order}
    for short, came in zip(shorts, (1, 130, 131, 400), strict=True):
        assert ends[short] - came <= 20 + 2 * 3, "more than one window of the long recording went first"
    assert sum(job is long for _, job in order) > 40


@pytest.mark.parametrize("silent", [0, 50])
def test_a_stream_of_short_recordings_does_not_stop_a_long_one(listener, silent):
    """Four clients that send as fast as they are answered leave a long recording its share, a fifth.

    Live sessions that are open and silent change nothing about it.
    """

    async def run():
        batcher = batcher_of(listener, batch_items=1)
        for _ in range(silent):
            batcher.enrol(Job("tones", Options(4), tones.RATE, lambda job: iter(()), live=True))
        long = queued(batcher, *[silence(20)] * 50)
        arrivals = [(0.0, lambda: queued(batcher, silence(3)))] * 4
        return long, served(batcher, arrivals, 900, done=lambda job: queued(batcher, silence(3)))

    long, order = asyncio.run(run())
    share = sum(20 for _, job in order if job is long) / 900
    assert 0.15 < share < 0.25, f"the long recording got {share:.1%}"


def test_windows_of_a_recording_go_in_order(listener):
    """Its short last window costs least, and still waits for the others."""

    async def run():
        batcher = batcher_of(listener)
        queued(batcher, silence(20), silence(20), silence(5))
        order = []
        while batcher.waiting:
            batch = batcher._take(choose(batcher.waiting, 1, 64.0, batcher.seconds_per_cost))
            order += [window.number for window in batch.windows]
        return order

    assert asyncio.run(run()) == [0, 1, 2]


def test_idle_time_is_not_saved_up():
    clock = FairClock()
    early = clock.start(0.0)
    clock.charge(10.0, 1)
    assert clock.start(early) == 10.0


def test_a_running_batch_is_interrupted_by_much_shorter_ones_only(listener):
    async def run():
        batcher = batcher_of(listener)
        queued(batcher, silence(20), silence(20), size=64)
        long = batcher._take(choose(batcher.waiting, 1, 64.0))
        assert batcher.urgent(long, 1.0) is None, "its own next window has no claim"
        queued(batcher, silence(19), size=64)
        assert batcher.urgent(long, 1.0) is None, "as long as what it would interrupt"
        short = queued(batcher, silence(3))
        found = batcher.urgent(long, 1.0)
        assert [window.job for window in found.windows] == [short]
        return batcher.urgent(long, 1.0)

    assert asyncio.run(run()) is None


def test_long_recordings_behind_their_share_give_way_to_a_short_one(listener):
    """Not one after the other: before each and between its passes, short ones go, for as long as it takes itself."""

    async def run():
        batcher = batcher_of(listener, batch_items=1)
        longs = [queued(batcher, silence(24), silence(24)) for _ in range(4)]
        batcher.clock.charge(100.0, 1)  # they received nothing of it
        running = batcher._next_turn()
        assert running.windows[0].job in longs
        short = queued(batcher, silence(3))
        assert batcher.urgent(running, 0.1).windows[0].job is short, "between passes"
        short = queued(batcher, silence(3))
        batcher.deliver(running, [], 1.0)
        assert batcher._next_turn().windows[0].job is short, "before the next one starts"
        shorts = [queued(batcher, silence(3)) for _ in range(50)]
        given = 1
        while batcher._next_turn().windows[0].job in shorts:
            given += 1
        return given

    assert asyncio.run(run()) == 24 / 3


def test_a_recording_saves_up_one_window_at_most(listener):
    """One that comes later does not wait until others that gave way for long have caught up."""

    async def run():
        batcher = batcher_of(listener, batch_items=1)
        queued(batcher, *[silence(20)] * 20)
        batcher.clock.charge(1000.0, 1)
        late = queued(batcher, silence(20))
        return late, [job for _, job in served(batcher, [], 400)]

    late, order = asyncio.run(run())
    assert 1 <= order.index(late) <= 3


def test_a_worker_runs_what_is_urgent_between_passes(listener):
    """Really: the short recording is answered while the long batch is still running."""
    samples, _ = tones.speak(TEXT, 500)
    order = []

    async def run():
        batcher = batcher_of(listener)
        long = queued(batcher, np.tile(samples, 8), size=64)
        batch = batcher._take(choose(batcher.waiting, 1, 64.0))
        short = queued(batcher, samples)
        for name, job in (("long", long), ("short", short)):
            job.done.add_done_callback(lambda _, name=name: order.append(name))
        await asyncio.to_thread(batcher.runners[0].run, batch, batcher)
        await asyncio.gather(long.done, short.done)
        return short.done.result()

    (decoded,) = asyncio.run(run())
    assert order == ["short", "long"]
    assert listener.transcript(decoded, 1.0).text == TEXT


# Decoding.


@given(strategies.lists(strategies.integers(0, 40_000), max_size=60), strategies.integers(0, 2**32 - 1))
def test_windows_are_those_of_the_whole_recording(listener, sizes, seed):
    """However the upload is decoded, block by block, its windows are the recogniser's."""
    samples = np.random.default_rng(seed).standard_normal(sum(sizes) + 1).astype(np.float32)
    blocks = np.split(samples, np.cumsum(sizes))
    cutter, cut = listener.cutter(), []
    for block in blocks:
        cutter.add(block)
        cut += cutter.complete()
    cut += cutter.rest()
    places = windows.spans(len(samples) / tones.RATE, *listener.window_frames(), listener.frame_seconds)
    expected = [samples[round(a * tones.RATE) :][: round(b * tones.RATE)] for a, b in places]
    for found in (cut, listener.cut(samples)):
        assert len(found) == len(expected)
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_an_hour_takes_the_memory_of_a_few_windows(folder):
    """The decoders wait for the network: at no time are more than a few windows of a recording decoded."""
    with serving(folder) as (address, service):
        most = 0
        push = service.batcher.push

        def counting(job, samples):
            nonlocal most
            push(job, samples)
            most = max(most, sum(window.seconds for window in service.batcher.waiting))

        service.batcher.push = counting
        answer = ask(address, wav(np.tile(long_speech()[1], 7)), block_size=1)
        assert answer.status_code == 200 and answer.json()["usage"]["seconds"] > 400
    assert 0 < most < 100


# Limits and cancellation.


def test_too_many_requests(folder):
    """A recording that is being transcribed holds the only place; the next is told to come back."""
    with serving(folder, max_requests=1) as (address, service):
        with connected(address) as connection, held(service) as go:
            connection.sendall(raw_request(wav()))
            wait_until(lambda: figure(address, "imputer_requests_in_progress") == 1)
            refusal = ask(address)
            error = check_envelope(refusal, 429, "queue_full")
            assert int(refusal.headers["retry-after"]) >= 1 and "try again" in error["message"]
            assert get(f"{address}/health").status_code == 200
            client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
            with client, pytest.raises(openai.RateLimitError):
                client.audio.transcriptions.create(model="tones", file=("a", wav()))
            go.set()
            assert TEXT.encode() in receive_all(connection)
        assert ask(address).status_code == 200


def test_an_upload_that_is_still_arriving_takes_no_place(folder):
    with serving(folder, max_requests=1) as (address, _):
        request = raw_request(wav())
        with connected(address) as connection:
            connection.sendall(request[:2000])
            wait_until(lambda: figure(address, "imputer_connections") >= 1)
            assert ask(address).json()["text"] == TEXT
            connection.sendall(request[2000:])
            assert TEXT.encode() in receive_all(connection)


def test_long_recordings_take_half_of_the_places_at_most(folder):
    long = wav(np.tile(long_speech()[1], 3))
    with (
        serving(folder, max_requests=2) as (address, service),
        ThreadPoolExecutor(1) as pool,
        held(service) as go,
    ):
        first = pool.submit(ask, address, long)
        wait_until(lambda: any(job.admitted.done() for job in service.batcher.jobs))
        check_envelope(ask(address, long), 429, "queue_full")
        go.set()
        assert first.result().status_code == 200
        assert ask(address).json()["text"] == TEXT


@pytest.mark.parametrize("stream", ["false", "true"])
def test_abandoned_requests_are_dropped(folder, stream):
    """A long recording whose client has gone does not run to its end, nor keep its place."""
    content = wav(np.tile(long_speech()[1], 7))  # more than 500 s: 26 windows
    with serving(folder) as (address, service):
        with connected(address) as connection:
            connection.sendall(raw_request(content, block_size="64", stream=stream))
            wait_until(lambda: figure(address, "imputer_batch_size_count") >= 1)
        wait_until(lambda: figure(address, "imputer_abandoned_total") == 1)
        wait_until(lambda: figure(address, "imputer_requests_in_progress") == 0)
        assert figure(address, "imputer_queue_depth") == 0 and not service.batcher.waiting
        assert figure(address, "imputer_audio_seconds_total") == 0
        wait_until(lambda: not service.decoders.idle)
        assert ask(address).json()["text"] == TEXT


def test_abandoned_while_uploading(folder):
    with serving(folder) as (address, _):
        with connected(address) as connection:
            connection.sendall(raw_request(wav())[:3000])
            wait_until(lambda: figure(address, "imputer_connections") >= 1)
        wait_until(lambda: figure(address, "imputer_abandoned_total") == 1)
        assert ask(address).json()["text"] == TEXT


def test_the_search_is_warm_before_the_first_request(listener, monkeypatch):
    """A model without a language model searches too, for hotwords: compiling that takes seconds, once."""
    searched = []

    def watched(*arguments, **options):
        searched.append(options)
        return fuse(*arguments, **options)

    fuse = fusion.fuse
    monkeypatch.setattr(fusion, "fuse", watched)
    monkeypatch.setattr(listener, "_searches", {})
    assert listener.language_model("default") is None
    runners.warm_up({"tones": listener}, Settings(models=("tones",)))
    assert searched


def test_uploads_are_limited_together(folder):
    """Many large uploads at once do not fill the disk."""
    with serving(folder, max_uploads_bytes=300_000) as (address, _):
        half = raw_request(bytes(400_000))
        with connected(address) as connection:
            connection.sendall(half[:200_000])
            wait_until(lambda: figure(address, "imputer_connections") >= 1)
            answer = ask(address, bytes(200_000))
            check_envelope(answer, 429, "queue_full")
        wait_until(lambda: ask(address, bytes(200_000)).status_code == 415)


def test_batches_are_counted_by_their_cost():
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        jobs = [Job("a", Options(size), 100, lambda job: iter(()), loop=loop) for size in (8, 8)]
    windows = [Window(job, 0, np.zeros(length), 0.0) for job, length in zip(jobs, (300, 200), strict=True)]
    assert Batch(windows).cost == 2 * 3.0 * (4 + 8)
