"""One producer, two consumers, a batch trainer: three stages joined by two channels, without Ray.

In a Ray flow, ``Channel.create(name)`` takes the place of ``Channel.local(name)``; nothing else changes.
"""

from threading import Thread

from rlinf_plugins.scheduler.channel import Channel, ChannelConfig, Granularity


def main() -> list[int]:
    prompts = Channel.local("prompts", ChannelConfig(max_items=8))
    samples = Channel.local("samples", ChannelConfig(producers=2, granularity=Granularity.micro_batch(4, step=10)))

    def generate(name: str) -> None:
        out = samples.producer(name)
        for batch in prompts.consumer(name):  # each prompt is acknowledged when the next is asked for
            out.put({"text": batch.value, "reward": len(batch.value)}, weight=len(batch.value))
        out.finish()

    workers = [Thread(target=generate, args=(f"rollout/{index}",)) for index in range(2)]
    for worker in workers:
        worker.start()
    with prompts.producer("data").stream() as stream:
        for index in range(20):
            stream.put(f"prompt {index}")
    prompts.close()
    sizes = []
    for batch in samples.consumer("trainer"):  # micro-batches as the plan says; never across a step's end
        sizes.append(len(batch))
        print(f"step {batch.step}: {len(batch)} samples" + (", optimiser step" if batch.ends_step else ""))
    for worker in workers:
        worker.join()
    prompts.destroy()
    samples.destroy()
    return sizes


if __name__ == "__main__":
    main()
