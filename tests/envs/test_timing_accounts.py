"""Where every second goes: to the controller, the iteration, the bookkeeping, or to nobody."""

import math

import pytest

from specgym.engine.timing import Baseline, Clock
from specgym.envs import decode

CONTROLLER, BOOKKEEPING = 0.25, 0.125  # binary fractions, so that sums are exact


class ScriptedClock(Clock):
    """A second for every row of a forward; the rest of the time passes where a test says so."""

    def __init__(self):
        self.seconds = 0.0

    def now(self):
        return self.seconds

    def charge(self, member_cost, num_rows):
        self.seconds += num_rows


@pytest.fixture
def clock():
    return ScriptedClock()


@pytest.fixture
def timed_env(make_env, clock, monkeypatch):
    """Makes an environment whose observation takes time, and whose probes are counted."""

    def make(**changes):
        env = make_env(clock=clock, **changes)
        observe, env.probe_seconds = env.observer.observe, 0.0

        def slowly(state):
            clock.seconds += BOOKKEEPING
            return observe(state)

        def probe(*arguments):
            started = clock.now()
            samples = decode_probe(*arguments)
            env.probe_seconds += clock.now() - started
            return samples

        monkeypatch.setattr(env.observer, "observe", slowly)
        monkeypatch.setattr(decode, "probe_baseline", probe)
        return env

    decode_probe = decode.probe_baseline
    return make


@pytest.fixture
def thinking(clock, by_chance):
    """Makes a policy that thinks for a while."""

    def make(seed):
        choose = by_chance(seed)

        def policy(env):
            clock.seconds += CONTROLLER
            return choose(env)

        return policy

    return make


def test_every_second_is_charged_once_or_is_a_probe_or_a_prefill(timed_env, play, thinking, clock):
    env = timed_env(num_requests=4, baseline=Baseline(every=3, num_samples=2))
    episode = play(env, thinking(0), seed=0)
    resets = [
        episode.reset_info,
        *(i["next_request"] for i in episode.infos if "next_request" in i),
    ]
    charged = math.fsum(episode.column("total_seconds"))
    prefills = math.fsum(info["prefill_seconds"] for info in resets)
    first_observations = BOOKKEEPING * len(resets)
    assert len(resets) == 4
    assert env.probe_seconds > 2 * 8 * len(episode.infos) / 4  # one probe in three steps or more
    assert clock.seconds == charged + prefills + env.probe_seconds + first_observations


def test_a_step_is_the_controller_the_iteration_and_the_bookkeeping(timed_env, play, thinking):
    episode = play(timed_env(num_requests=3), thinking(1), seed=0)
    assert set(episode.column("controller_seconds")) == {CONTROLLER}
    for info in episode.infos:
        rest = info["total_seconds"] - info["iter_seconds"] - info["controller_seconds"]
        assert rest == BOOKKEEPING


def test_the_controllers_work_after_a_step_is_charged_to_the_next(timed_env, clock):
    env = timed_env()
    env.reset(seed=0)
    env.step(0)
    clock.seconds += 3.0  # observe()
    clock.seconds += 2.0  # act()
    *_, info = env.step(0)
    assert info["controller_seconds"] == 5.0


def test_prefill_and_probes_are_charged_to_nobody(timed_env, clock):
    baseline = Baseline(every=2, num_samples=5)
    env = timed_env(baseline=baseline, max_new_tokens=3, num_requests=2)
    _, info = env.reset(seed=0)
    assert info["prefill_seconds"] == info["num_prompt"] - 1
    assert env.probe_seconds == 5 * 8
    steps = []
    for _ in range(4):
        before, probed = clock.seconds, env.probe_seconds
        *_, info = env.step(0)
        steps.append((clock.seconds - before, env.probe_seconds - probed, info))
    assert [probed for _, probed, _ in steps] == [0, 40, 0, 40]
    for elapsed, probed, info in steps:
        assert info["total_seconds"] == info["iter_seconds"] + BOOKKEEPING == 8 + BOOKKEEPING
        following = info.get("next_request")
        prefill = following["prefill_seconds"] + BOOKKEEPING if following else 0.0
        assert elapsed == info["total_seconds"] + probed + prefill
    assert steps[2][2]["next_request"]["prefill_seconds"] > 0


@pytest.mark.parametrize("exact", [True, False])
def test_probes_do_not_change_what_is_decoded(make_env, play, by_chance, exact):
    often, seldom = (
        play(make_env(exact=exact, baseline=Baseline(every=n)), by_chance(0), seed=0)
        for n in (1, 1000)
    )
    assert often.infos[-1]["output"] == seldom.infos[-1]["output"]
    assert often.column("iter_seconds") == seldom.column("iter_seconds")
    assert often.column("kv_len") == seldom.column("kv_len")


def test_catchup_is_inside_the_iteration_and_stated(timed_env):
    env = timed_env()
    _, reset_info = env.reset(seed=0)
    first, second = (env.step(env.action_names.index("draft>mid@2"))[-1] for _ in range(2))
    prompt = reset_info["num_prompt"] - 1
    assert first["catchup_seconds"] == 2 * prompt  # both members' prefill, a row a second
    assert second["catchup_seconds"] == 0.0
    for info in (first, second):
        parts = ("draft_seconds", "verify_seconds", "catchup_seconds")
        assert info["iter_seconds"] == sum(info[part] for part in parts)
        for part in parts:
            role = part.removesuffix("_seconds")
            rows = [each for each in info["forwards"] if each["role"] == role]
            assert info[part] == sum(each["seconds"] for each in rows)
        assert info["draft_seconds"] == 2 * 8  # two forwards of the window's rows
        assert info["verify_seconds"] == 2 * 8


def test_a_member_left_idle_catches_up_and_pays_for_it(timed_env):
    env = timed_env(max_new_tokens=40)
    env.reset(seed=0)
    draft = env.action_names.index("draft@1")
    env.step(draft)
    for _ in range(20):
        env.step(0)
    *_, info = env.step(draft)
    assert info["catchup_seconds"] >= 2 * 8
    *_, info = env.step(draft)
    assert info["catchup_seconds"] == 0.0


def test_utility_is_tokens_over_relative_cost(timed_env, play, thinking):
    baseline = Baseline()
    env = timed_env(baseline=baseline, num_requests=2)
    episode = play(env, thinking(3), seed=0)
    for info in episode.infos:
        assert info["baseline_seconds"] == 8.0
        assert info["utility"] == info["tokens"] * 8.0 / info["iter_seconds"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("exact", [True, False])
def test_net_utility_sums_to_the_time_saved_over_a_request(make_env, play, by_chance, seed, exact):
    episode = play(make_env(exact=exact), by_chance(seed), seed=seed)
    (baseline,) = set(episode.column("baseline_seconds"))
    tokens = len(episode.infos[-1]["output"])
    saved = (tokens * baseline - math.fsum(episode.column("iter_seconds"))) / baseline
    assert math.fsum(episode.rewards) == pytest.approx(saved, abs=1e-9)


def test_no_speculation_pays_for_bookkeeping_like_any_plan(timed_env, play, thinking):
    env = timed_env()
    none = play(env, seed=0)
    for info in none.infos:
        assert info["total_seconds"] == info["iter_seconds"] + BOOKKEEPING


def test_on_the_wall_clock_the_parts_fit_into_the_whole(make_env, play, by_chance):
    episode = play(make_env(clock="wall"), by_chance(0), seed=0)
    for info in episode.infos:
        parts = info["draft_seconds"] + info["verify_seconds"] + info["catchup_seconds"]
        assert 0.0 < parts <= info["iter_seconds"]
        assert 0.0 <= info["controller_seconds"] <= info["total_seconds"] - info["iter_seconds"]
        assert info["baseline_seconds"] > 0.0
    assert all(map(math.isfinite, episode.rewards))


# The shared baseline


def test_environments_that_share_a_baseline_measure_it_once_and_see_the_same(make_env, monkeypatch):
    probes = []
    probe = decode.probe_baseline
    monkeypatch.setattr(decode, "probe_baseline", lambda *a: probes.append(a[1]) or probe(*a))
    baseline = Baseline()
    first, second = make_env(baseline=baseline), make_env(baseline=baseline)
    infos = [env.reset(seed=0)[1] for env in (first, second)]
    assert len(probes) == 1
    assert infos[0]["baseline_seconds"] == infos[1]["baseline_seconds"]
    baseline.add(first.state.kv_length, [7.0] * 15)
    for env in (first, second):
        assert env.step(0)[-1]["baseline_seconds"] == 7.0


def test_steps_of_all_environments_count_towards_the_next_probe(make_env):
    baseline = Baseline(every=100)
    envs = [make_env(baseline=baseline), make_env(baseline=baseline)]
    for env in envs:
        env.reset(seed=0)
    for env in (*envs, *envs, envs[0]):
        env.step(0)
    assert baseline.num_steps == 5


def test_without_a_given_baseline_an_environment_has_its_own(make_env):
    assert make_env().baseline is not make_env().baseline
