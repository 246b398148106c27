"""The windows of a live stream, decoded by the batcher."""

import asyncio
from dataclasses import replace

from imputer.decoding import Decoded
from imputer.server.batcher import Batcher
from imputer.server.failures import Failure
from imputer.server.jobs import Job
from imputer.streaming import Window
from imputer.streaming.live import OPTIONS


class LiveDecoder:
    """Decodes the windows of one stream through the batcher, one at a time."""

    def __init__(self, batcher: Batcher, model: str, sample_rate: int) -> None:
        self.batcher, settings = batcher, batcher.settings
        options = replace(OPTIONS, lm=settings.lm, hotwords=settings.hotwords)
        self.job = Job(model, options, sample_rate, open=lambda job: iter(()), live=True)
        self.job.on_window = self._deliver
        self.job.done.add_done_callback(self._failed)
        self.answer: asyncio.Future | None = None
        self.batcher.enrol(self.job)

    async def decode(self, window: Window) -> Decoded:
        self.answer = asyncio.get_running_loop().create_future()
        if self.job.done.done():
            self._failed(self.job.done)
        else:
            self.batcher.push(self.job, window.samples, window.start)
        return await self.answer

    def _deliver(self, number: int, decoded: Decoded) -> None:
        del self.job.results[number]  # hours of them
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(decoded)

    def _failed(self, done: asyncio.Future) -> None:
        error = done.exception() if not done.cancelled() else None
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(error or Failure(500, "the stream ended", "internal_error"))

    def close(self) -> None:
        self.batcher.cancel(self.job)
        self.batcher.count_work(self.job)
