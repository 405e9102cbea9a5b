#!/usr/bin/env python3
"""loadtest/scale_sim.py against cases that can be worked out by hand, and against itself."""
import os
import pathlib
import sys
import unittest

SOURCE = pathlib.Path(os.environ.get("WINNOW_SOURCE_DIR", pathlib.Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(SOURCE / "loadtest"))
import scale_sim  # noqa: E402
from scale_sim import Costs, Replica, Router, Traffic, simulate  # noqa: E402

COSTS = Costs(1000.0, 10000.0, [(1, 0.01), (3, 0.03)], store_tokens=1_000_000)
FEW = Traffic(conversations_per_replica_s=0.02, seconds=500, documents_per_replica=4, document_tokens=2000, turns=4, question_tokens=50,
              answer_tokens=20, think_s=5)


class ScaleSim(unittest.TestCase):
    def test_steps_lie_on_the_lines_between_measured_points(self):
        self.assertEqual([round(COSTS.step(n), 6) for n in (1, 2, 3, 5)], [0.01, 0.02, 0.03, 0.05])

    def test_one_conversation_on_one_replica_costs_what_it_does_by_hand(self):
        class OneArrival:
            def expovariate(self, rate):
                return 10.0
        traffic = Traffic(conversations_per_replica_s=1, seconds=15, documents_per_replica=1, document_tokens=1000, turns=2, question_tokens=100,
                          answer_tokens=10, think_s=1)
        rng = OneArrival()
        rng.random = lambda: 0.5
        real, scale_sim.random.Random = scale_sim.random.Random, lambda seed: rng
        try:
            result = simulate(1, "round_robin", traffic, COSTS)
        finally:
            scale_sim.random.Random = real
        self.assertEqual(result["requests"], 2)
        # 1,100 tokens computed and a step; then 1,110 taken over, 100 computed, and a step.
        self.assertAlmostEqual(result["first_token_p99_s"], 1.1 + 0.01)
        self.assertAlmostEqual(result["mean_wait_s"], 0)
        self.assertEqual(result["computed_tokens"], 1100 + 100)
        self.assertAlmostEqual(result["cached_share"], 1110 / (1100 + 1210))

    def test_one_replica_is_the_same_by_every_rule(self):
        results = [simulate(1, rule, FEW, COSTS) for rule in scale_sim.RULES]
        for result in results:
            result.pop("rule")
        self.assertEqual(results[0], results[1])
        self.assertEqual(results[0], results[2])

    def test_the_seed_decides_everything(self):
        self.assertEqual(simulate(5, "prefix_aware", FEW, COSTS, 3), simulate(5, "prefix_aware", FEW, COSTS, 3))
        self.assertNotEqual(simulate(5, "prefix_aware", FEW, COSTS, 3), simulate(5, "prefix_aware", FEW, COSTS, 4))

    def test_routers_that_know_prefixes_compute_less_and_stay_with_the_holder(self):
        prefix, around = simulate(8, "prefix_aware", FEW, COSTS), simulate(8, "round_robin", FEW, COSTS)
        self.assertLess(prefix["computed_tokens"], 0.7 * around["computed_tokens"])
        self.assertGreater(prefix["followups_on_holder"], 0.95)
        self.assertLess(around["followups_on_holder"], 0.6)
        self.assertLess(prefix["first_token_p95_s"], around["first_token_p95_s"])

    def test_without_a_store_nothing_is_cached(self):
        none = Costs(1000.0, 10000.0, [(1, 0.01)], store_tokens=0)
        self.assertEqual(simulate(4, "prefix_aware", FEW, none)["cached_share"], 0)

    def test_the_store_stays_within_its_bound_and_the_router_hears_of_what_goes(self):
        costs = Costs(1000.0, 10000.0, [(1, 0.01)], store_tokens=250)
        replica, gone = Replica(costs), []
        for document in range(4):
            replica.keep(("document", document), 100, 100, gone.append)
            self.assertLessEqual(replica.stored, 250)
            self.assertEqual(replica.stored, sum(replica.own.values()))
        self.assertEqual(gone, [("document", 0), ("document", 1)])
        replica.keep(("document", 2), 100, 100, gone.append)  # used again: 3 is the oldest now
        replica.keep(("document", 9), 100, 100, gone.append)
        self.assertEqual(gone[-1], ("document", 3))

    def test_a_holder_that_is_far_behind_is_passed_over(self):
        machines = [Replica(COSTS), Replica(COSTS)]
        router = Router("prefix_aware", machines)
        machines[1].keep(("document", 7), 2000, 2000, None)
        router.holders["document", 7].add(1)
        machines[1].free_at = 1.9  # computing 2,000 tokens takes 2 s
        self.assertEqual(router.choose(0, 7, 0), 1)
        machines[1].free_at = 2.1
        self.assertEqual(router.choose(0, 7, 0), 0)

    def test_the_highest_rate_keeps_the_limit_and_more_does_not(self):
        rate = scale_sim.highest_rate(4, "prefix_aware", FEW, COSTS, 4.0)
        at = lambda r: simulate(4, "prefix_aware", Traffic(**{**FEW.__dict__, "conversations_per_replica_s": r}), COSTS)["first_token_p95_s"]
        self.assertLessEqual(at(rate), 4.0)
        self.assertGreater(at(rate * 1.5), 4.0)

    def test_the_costs_that_come_with_it_can_be_read(self):
        for policy in ("dense", "lsh:k=512"):
            self.assertGreater(scale_sim.load_costs(scale_sim.COSTS, policy).step(8), 0.004)


if __name__ == "__main__":
    unittest.main(verbosity=2)
