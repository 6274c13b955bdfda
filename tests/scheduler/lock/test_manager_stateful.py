"""The lock against a naive model, under any order of calls, deaths and delays; then oracles over the history."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlinf_plugins.core.clock import ManualClock
from rlinf_plugins.core.errors import HoldAndWaitError, LockTimeoutError, NotOwnerError, StaleTokenError
from rlinf_plugins.scheduler.lock.manager import LockManager
from rlinf_plugins.scheduler.lock.types import Granted, Lease, Priority, Revoked, TimedOut, Withdrawn
from rlinf_plugins.testing.lock_history import Hold, check_holds

DEVICES = ["d0", "d1", "d2"]
CAPACITY = 10
TTL, BYPASS, STARVE = 10.0, 2, 25.0
INF = float("inf")
OWNERS = [f"o{i}" for i in range(6)]
SESSIONS = ["s0", "s1", "s2"]


class Model:
    """The lock's promises in the plainest terms: dictionaries, sets and full scans."""

    def __init__(self):
        self.held = {}  # owner -> dict(devices, shared, nbytes, count, session)
        self.queue = []  # dicts, in arrival order
        self.deadline = {}

    def fits(self, want, extra_reserved=frozenset()):
        if want["devices"] & extra_reserved:
            return False
        for device in want["devices"]:
            on_it = [h for h in self.held.values() if device in h["devices"]]
            if any(not h["shared"] for h in on_it) or (on_it and not want["shared"]):
                return False
            if want["shared"] and sum(h["nbytes"] for h in on_it) + want["nbytes"] > CAPACITY:
                return False
        return True

    def starved(self, wait, now):
        return wait["bypassed"] >= BYPASS or now - wait["since"] >= STARVE

    def enter(self, want, waiting):
        self.held[want["owner"]] = {**want, "count": 1}
        for wait in waiting:
            if wait["devices"] & want["devices"]:
                wait["bypassed"] += 1

    def ask(self, want, now):
        reserved = frozenset().union(*(w["devices"] for w in self.queue if self.starved(w, now)))
        if self.fits(want, reserved):
            self.enter(want, self.queue)
            return True
        return False

    def serve(self, now):
        grants = []
        while True:
            aged = [w for w in self.queue if self.starved(w, now)]
            rest = sorted((w for w in self.queue if w not in aged), key=lambda w: w["priority"].key())
            reserved = set()
            for wait in aged + rest:
                if self.fits(wait, reserved):
                    break
                if wait in aged:
                    reserved |= wait["devices"]
            else:
                return grants
            position = self.queue.index(wait)
            self.queue.remove(wait)
            self.enter(wait, self.queue[:position])
            grants.append(wait["owner"])

    def drop_session(self, session):
        self.held = {o: h for o, h in self.held.items() if h["session"] != session}
        self.queue = [w for w in self.queue if w["session"] != session]


class LockMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.clock = ManualClock()
        self.lock = LockManager(
            dict.fromkeys(DEVICES, CAPACITY), clock=self.clock, ttl_s=TTL, max_bypass=BYPASS, starvation_s=STARVE
        )
        self.model = Model()
        self.leases: dict[str, Lease] = {}
        self.starts: dict[int, float] = {}
        self.ended: list[Lease] = []
        self.history: list[Hold] = []
        self.last_token = 0

    def got(self, lease: Lease) -> None:
        assert lease.token > self.last_token, "tokens must grow with the grants"
        self.last_token = lease.token
        self.leases[lease.owner] = lease
        self.starts[lease.token] = self.clock()

    def gone(self, lease: Lease) -> None:
        del self.leases[lease.owner]
        self.ended.append(lease)
        self.history.append(
            Hold(
                token=lease.token,
                owner=lease.owner,
                devices=lease.devices,
                start=self.starts[lease.token],
                end=self.clock(),
                shared=lease.shared,
                nbytes=lease.nbytes,
            )
        )

    def settle(self, expect_grants: list[str], expect_timeouts: set[int] = frozenset()) -> None:
        grants, timeouts = [], set()
        for event in self.lock.drain_events():
            match event:
                case Granted(lease=lease):
                    grants.append(lease.owner)
                    self.got(lease)
                case Revoked(lease=lease):
                    self.gone(lease)
                case TimedOut(ticket=number):
                    timeouts.add(number)
                case Withdrawn():
                    pass
        assert grants == expect_grants
        assert timeouts == set(expect_timeouts)

    @rule(
        owner=st.sampled_from(OWNERS),
        devices=st.frozensets(st.sampled_from(DEVICES), min_size=1),
        nbytes=st.one_of(st.none(), st.integers(1, CAPACITY)),
        priority=st.builds(Priority, ready=st.booleans(), urgency=st.sampled_from([0.0, 1.0]), resident=st.booleans()),
        timeout=st.sampled_from([INF, 0, 3.0, 8.0]),
        session=st.sampled_from(SESSIONS),
    )
    def acquire(self, owner, devices, nbytes, priority, timeout, session):
        self.ask(owner, devices, nbytes, priority, timeout, session)

    @rule(owner=st.sampled_from(OWNERS), device=st.sampled_from(DEVICES), session=st.sampled_from(SESSIONS))
    def acquire_one(self, owner, device, session):
        self.ask(owner, frozenset([device]), None, Priority(), INF, session)

    def ask(self, owner, devices, nbytes, priority, timeout, session):
        now, model, shared = self.clock(), self.model, nbytes is not None
        want = {
            "owner": owner,
            "session": session,
            "devices": devices,
            "shared": shared,
            "nbytes": nbytes or 0,
            "priority": priority,
            "since": now,
            "bypassed": 0,
            "timeout": now + timeout,
        }
        model.deadline[session] = now + TTL
        held = model.held.get(owner)
        inside = held and devices <= held["devices"]
        inside = inside and not (held["shared"] and (not shared or want["nbytes"] > held["nbytes"]))
        waits = owner in [w["owner"] for w in model.queue]
        try:
            answer = self.lock.acquire(
                owner,
                devices,
                shared=shared,
                nbytes=nbytes or 0,
                priority=priority,
                timeout_s=timeout,
                session=session,
            )
        except HoldAndWaitError:
            assert (held and not inside) or waits
            return
        except LockTimeoutError:
            assert timeout == 0
            assert not held
            assert not model.ask(want, now)
            return
        if held:
            assert inside
            assert answer == self.leases[owner]
            held["count"] += 1
        elif isinstance(answer, Lease):
            assert not waits, "an owner that waits must not come to hold as well"
            assert model.ask(want, now)
            self.got(answer)
        else:
            assert not waits
            assert not model.ask(want, now)
            model.queue.append({**want, "ticket": answer.number})
        self.settle([])

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data):
        owner = data.draw(st.sampled_from(sorted(self.leases)))
        lease, held = self.leases[owner], self.model.held[owner]
        freed = self.lock.release(lease.token, owner)
        held["count"] -= 1
        assert freed == (held["count"] == 0)
        if freed:
            del self.model.held[owner]
            self.gone(lease)
        self.settle(self.model.serve(self.clock()) if freed else [])

    @precondition(lambda self: self.leases or self.ended)
    @rule(data=st.data(), thief=st.sampled_from(OWNERS))
    def bad_release(self, data, thief):
        for lease in self.ended[-1:]:
            try:
                self.lock.release(lease.token, lease.owner)
            except StaleTokenError:
                continue
            raise AssertionError(f"{lease} was released twice")
        for lease in self.leases.values():
            if lease.owner != thief:
                try:
                    self.lock.release(lease.token, thief)
                except NotOwnerError:
                    continue
                raise AssertionError(f"{thief} released {lease}")

    @precondition(lambda self: self.model.queue)
    @rule(data=st.data())
    def cancel(self, data):
        wait = data.draw(st.sampled_from(self.model.queue))
        self.model.queue.remove(wait)
        assert self.lock.cancel(wait["ticket"])
        self.settle(self.model.serve(self.clock()))

    @precondition(lambda self: self.model.queue)
    @rule(data=st.data(), urgency=st.sampled_from([0.0, 1.0, 2.0]))
    def reprioritise(self, data, urgency):
        wait = data.draw(st.sampled_from(self.model.queue))
        wait["priority"] = Priority(urgency=urgency)
        assert self.lock.reprioritise(wait["owner"], wait["priority"])

    def renew(self, session):
        self.model.deadline[session] = self.clock() + TTL
        mine = {o for o, h in self.model.held.items() if h["session"] == session}
        assert self.lock.renew(session) == {self.leases[owner].token for owner in mine}

    @precondition(lambda self: len(self.leases) > 2)
    @rule(session=st.sampled_from(SESSIONS))
    def die(self, session):
        self.model.deadline.pop(session, None)
        self.model.drop_session(session)
        self.lock.end_session(session, "reported dead")
        self.settle(self.model.serve(self.clock()))

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 7.0, 11.0]), alive=st.sets(st.sampled_from(SESSIONS), min_size=1))
    def wait(self, seconds, alive):
        for session in alive:
            self.renew(session)
        target = self.clock() + seconds
        while True:
            # The host ticks at each deadline; the model does the same, so that grants happen at the same instants.
            due = self.lock.next_deadline()
            if due is None or due > target:
                break
            self.clock.advance(max(0.0, due - self.clock()))
            self.expire()
        self.clock.advance(target - self.clock())

    def expire(self):
        now, model = self.clock(), self.model
        for session in [s for s, deadline in model.deadline.items() if deadline <= now]:
            del model.deadline[session]
            model.drop_session(session)
        late = [w for w in model.queue if w["timeout"] <= now]
        model.queue = [w for w in model.queue if w not in late]
        self.lock.tick()
        self.settle(model.serve(now), {w["ticket"] for w in late})

    @invariant()
    def agrees_with_the_model(self):
        state = self.lock.state()
        assert {(h.owner, frozenset(h.devices), h.count) for h in state.holders} == {
            (owner, h["devices"], h["count"]) for owner, h in self.model.held.items()
        }
        assert {w.owner: w.bypassed for w in state.waiters} == {w["owner"]: w["bypassed"] for w in self.model.queue}
        assert all(w.bypassed <= BYPASS for w in state.waiters), "overtaken more often than promised"
        assert all(w.why != "nothing in the way" for w in state.waiters), "a waiter that could go must not wait"

    @invariant()
    def no_deadlock(self):
        holders = {h["owner"] for h in self.model.held.values()}
        assert not holders & {w["owner"] for w in self.model.queue}, "no owner may both hold and wait"
        assert holders or not self.model.queue, "somebody must be able to make progress"

    def teardown(self):
        for lease in list(self.leases.values()):
            self.gone(lease)
        check_holds(self.history, dict.fromkeys(DEVICES, CAPACITY))


TestLock = LockMachine.TestCase
TestLock.settings = settings(max_examples=150, stateful_step_count=60, deadline=None, print_blob=True)
