"""Videos of episodes: named after their outcome, with task and seed inside, encoded while the episodes go on."""

import subprocess
import time
from dataclasses import replace

import imageio_ffmpeg
import numpy as np
import pytest

from rlinf_plugins.core.errors import ConfigError, EnvStartError
from rlinf_plugins.envs import InitialState, PoolConfig, VideoConfig
from rlinf_plugins.envs import recording as films
from rlinf_plugins.testing.envs import ToyFactory

SIZE = 32


@pytest.fixture
def filmed(make_pool, quick, tmp_path):
    def make(num_envs=1, limit=6, **options):
        episode = replace(quick.episode, max_steps=limit)
        deadlines = replace(quick.deadlines, close=30.0)
        config = replace(quick, video=VideoConfig(folder=str(tmp_path), **options), episode=episode)
        return make_pool(
            ToyFactory(image=SIZE, length=lambda task, trial: trial + 2), num_envs, replace(config, deadlines=deadlines)
        )

    return make


def metadata(path):
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(path), "-f", "ffmetadata", "-"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_film_says_how_it_ended_and_where_it_began(filmed, tmp_path):
    pool = filmed()
    for trial in (1, 7):
        pool.reset([InitialState(task=1, trial=trial)])
        for _ in range(6):
            pool.step_chunk(np.full((1, 1, 3), 0.5))
    pool.close()
    assert names(tmp_path) == ["Toy-task1-trial1-slot0-000000-success.mp4", "Toy-task1-trial7-slot0-000001-failure.mp4"]
    success, failure = sorted(tmp_path.iterdir())
    assert "comment=task\\=1 trial\\=1 return\\=4.5000 success instruction\\=move 1" in metadata(success)
    assert "trial\\=7" in metadata(failure)
    frames, _ = imageio_ffmpeg.count_frames_and_secs(str(failure))
    assert frames == 7  # the reset and six steps


@pytest.mark.slow
def test_an_episode_that_left_memory_is_filmed_from_where_it_came_back(filmed, tmp_path):
    pool = filmed()
    pool.reset([InitialState(trial=2)])
    pool.step_chunk(np.zeros((1, 1, 3)))
    pool.offload()
    pool.onload()
    assert pool.step_chunk(np.zeros((1, 5, 3))).failures == {}
    pool.close()
    assert names(tmp_path) == ["Toy-task0-trial2-slot0-000000-success.mp4"]


@pytest.mark.slow
def test_films_of_another_pool_and_of_a_new_process_stay(filmed, tmp_path):
    for _ in range(2):
        pool = filmed()
        pool.reset([InitialState()])
        pool.step_chunk(np.zeros((1, 3, 3)))
        pool.close()
    first = "Toy-task0-trial0-slot0-000000-success"
    assert names(tmp_path) == [f"{first}.mp4", f"{first}~2.mp4"]


@pytest.mark.slow
def test_each_nth_episode_is_filmed(filmed, tmp_path):
    pool = filmed(every=2)
    for _ in range(3):
        pool.reset([InitialState()])
        pool.step_chunk(np.zeros((1, 3, 3)))
    pool.close()
    assert [name[-18:-12] for name in names(tmp_path)] == ["000000", "000002"]


def test_handing_an_episode_to_the_encoder_never_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(films, "_encode", lambda film, fps: time.sleep(0.5))
    recorder = films.Recorder(VideoConfig(folder=str(tmp_path)), "Toy", 0, "main_images")
    frame = {"main_images": np.zeros((SIZE, SIZE, 3), np.uint8)}
    for number in range(8):
        recorder.begin(InitialState(), "", number)
        recorder.add(frame)
        began = time.perf_counter()
        recorder.finish(success=True, ret=0.0)
        assert time.perf_counter() - began < 0.25  # an encoding takes twice that
    recorder.close()


def test_what_cannot_be_filmed_is_refused(make_pool, quick, tmp_path):
    with pytest.raises(EnvStartError, match="observes no image"):
        make_pool(ToyFactory(), 1, replace(quick, video=VideoConfig(folder=str(tmp_path))))
    for option in ({"fps": 0}, {"every": 0}):
        with pytest.raises(ConfigError, match=r"config\.video\.\w+ must be at least 1, got 0"):
            make_pool(ToyFactory(image=8), 1, PoolConfig(video=VideoConfig(folder=str(tmp_path), **option)))
