"""Tests of what the measuring scripts do with what was measured. Every figure here is made up, to be formatted or
parsed; none was measured. Run: python3 -m unittest discover -s integration"""

import tempfile
import unittest
from pathlib import Path

import bench_ranks
import bench_table as table
from gpu_matrix import HEAD, Outcome, Slots, text
from matrix_lines import LINES, SELF_TEST, Line, nccl
from matrix_trial import Record
from steps import Steps
from supervised import Job, manifests, seconds, variable


def snapshot(scale):
    took = {name: scale * (n + 1) for n, name in enumerate(table.PHASES)}
    return {**took, "freeze": sum(took.values())}


def trial(how, scales, gib=16, crash=None):
    return {"gib": gib, "how": how, "snapshots": [snapshot(s) for s in scales], "crash": crash, "bytes": 20 * 10**9}


class Rows(unittest.TestCase):
    def test_later_snapshots_are_compared_with_the_plain_recipe_and_the_first(self):
        trials = [trial("on", [2.0, 1.0, 1.0], crash=1.5), trial("plain", [8.0], crash=12.0)]
        plain, first, later = table.rows(trials, [], None)
        self.assertEqual(plain[1:3] + plain[7:], ["plain recipe", "8.00", "120.00", "", "1.2", "0.6", "12.00", ""])
        self.assertEqual(first[1:3], ["rekindle, first (2.00x)", "2.00"])
        self.assertEqual(first[7:], ["30.00", "1/4.0", "5.0", "2.5", "", ""])
        self.assertEqual(later[7:], ["15.00", "1/8.0", "10.0", "5.0", "1.50", "1/8.0"])

    def test_a_trial_without_figures_says_why_and_nothing_else(self):
        (row,) = table.rows([{"gib": 96, "how": "plain", "why": "96 GiB do not fit on the disk"}], [], None)
        self.assertEqual(row, ["96", "plain recipe: 96 GiB do not fit on the disk"] + [""] * 11)

    def test_an_image_without_phases_has_its_freeze(self):
        bare = {"gib": 1, "how": "on", "snapshots": [{"freeze": 3.0}, {"freeze": 2.0}], "crash": None, "bytes": 10**9}
        first, later = table.rows([bare], [], None)
        self.assertEqual([first[2], first[7], later[7], later[9]], ["", "3.00", "2.00", ""])

    def test_every_row_is_as_long_as_the_head(self):
        trials = [trial("plain", [8.0]), trial("off", [4.0, 4.0]), trial("on", [2.0])]
        trials.append({"gib": 1, "how": "on", "why": "no"})
        saves = [{"gib": 16, "torch_save": 18.0, "async_save": None}]
        found = table.rows(trials, saves, {"out": 55.0, "in": 54.0})
        self.assertEqual({len(row) for row in found}, {len(table.HEAD)})
        self.assertEqual([row[1] for row in found if row[1].startswith(("torch", "dcp"))], ["torch.save"])
        self.assertEqual(found[-1][9:11], ["55.0", "54.0"])

    def test_the_text_is_a_table_of_markdown(self):
        text = table.markdown(["a", "what", "c"], [["1", "x", ""], ["16", "longer", "2.00"]]).splitlines()
        self.assertEqual(text[0], "|   a | what   |    c |")
        self.assertEqual(text[1], "|----:|--------|-----:|")
        self.assertEqual(text[3], "|  16 | longer | 2.00 |")

    def test_the_rate_between_two_sizes_has_no_fixed_costs(self):
        small, large = trial("on", [1.0], gib=1), trial("on", [2.0], gib=16)
        large["bytes"] = 60 * 10**9
        # 40 GB more in 2 s more of checkpoint and in 4 s more of restore.
        self.assertEqual(table.between([large, small]), (1, 16, 20.0, 10.0))
        self.assertIsNone(table.between([small]))


class Lines(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.steps = Steps(Path(self.folder.name) / "steps")

    def write(self, text):
        self.steps.path.write_text(text)

    def test_nothing_is_read_before_there_is_a_file(self):
        self.assertEqual((self.steps.last(), self.steps.bytes(), self.steps.all()), (0, None, []))

    def test_a_line_that_is_not_yet_whole_does_not_count(self):
        self.write("0 1024 torch\n1 100.0 0.5 0x1p+0 ff\n2 100.5 0.")
        self.assertEqual((self.steps.last(), self.steps.bytes()), (1, 1024))

    def test_a_restored_job_is_seen_by_the_time_of_its_steps(self):
        self.write("0 1024 torch\n4 100.0 0.5 a b\n5 101.0 0.5 a b\n5 120.0 0.5 a b\n")
        self.assertEqual(self.steps.first_after(110.0), 120.0)
        self.assertIsNone(self.steps.first_after(120.0))

    def test_a_step_with_other_bits_is_named(self):
        known = {}
        self.write("1 100.0 0.5 0x1p+0 ff\n2 101.0 0.5 0x1p+1 ff\n2 120.0 0.5 0x1p+1 ff\n")
        self.assertIsNone(self.steps.differs(known))
        self.write("1 100.0 0.5 0x1p+0 ff\n2 101.0 0.5 0x1p+1 fe\n")
        self.assertEqual(self.steps.differs(known), 2)

    def test_lengths_are_those_within_the_windows_without_their_beginnings(self):
        self.write("".join(f"{n} {100 + n} {n}.0 a b\n" for n in range(1, 9)))
        self.assertEqual(self.steps.lengths([(101.5, 104.5), (106.5, 108.5)]), [3.0, 4.0, 8.0])


class Parsing(unittest.TestCase):
    def test_a_manifest_is_found_with_and_without_its_envelope(self):
        inner = b'{"id": "000001-x", "phases": [{"phase": "dump", "started_us": 5, "took_us": 1500000}]}'
        whole = b'{"format": "f", "version": 1, "blake3": "0", "manifest": ' + inner + b"}"
        found = manifests([inner, whole, b"{half"])
        self.assertEqual([m["id"] for m in found], ["000001-x", "000001-x"])
        self.assertEqual(seconds(found[0]), {"dump": 1.5})

    def test_keys_become_variables(self):
        self.assertEqual(variable("store.keep-last"), "REKINDLE_STORE_KEEP_LAST")

    def test_settings_reach_rekindle_and_environment_the_job(self):
        job = Job("rekindle", Path("/nowhere"), "j", ["true"], settings={"store.keep-last": 1}, environment={"A": "b"})
        self.assertEqual((job.environment["REKINDLE_STORE_KEEP_LAST"], job.environment["A"]), ("1", "b"))


class Ranks(unittest.TestCase):
    def test_two_ranks_are_compared_with_one_of_the_same_size(self):
        def of(kind, scales, gib=16):
            return {"gib": gib, "kind": kind, "snapshots": [snapshot(s) for s in scales], "why": "it did not fit"}

        found = bench_ranks.rows([of("one", [4.0, 1.0, 1.0]), of("gloo", [2.0, 1.25, 1.25]), of("nccl", [1.0], 8), of("nccl", [])])
        one, gloo, other, none = found
        self.assertEqual({len(row) for row in found}, {len(bench_ranks.HEAD)})
        self.assertEqual((one[7:], gloo[7:], other[7:]), (["15.00", "", "60.00"], ["18.75", "1.25x", "30.00"], ["15.00", "", "15.00"]))
        self.assertEqual(none[1], "two ranks, two GPUs, NCCL: it did not fit")


class Matrix(unittest.TestCase):
    def lines(self, *files):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        for rank, content in enumerate(files):
            (Path(folder.name) / f"steps.{rank}").write_text(content)
        return Record(Path(folder.name), len(files))

    def test_the_bits_are_compared_as_far_as_the_job_went(self):
        alone = self.lines("1 a\n2 b\n3 c\n4 d\n", "1 e\n2 f\n3 g\n")
        self.assertIsNone(self.lines("1 a\n2 b\n3 c\n", "1 e\n2 f\n3 g\n").differ(alone))
        self.assertIn("rank 1 has other bits", self.lines("1 a\n2 b\n", "1 e\n2 x\n").differ(alone))
        self.assertIn("from step 4 on", self.lines("1 a\n", "1 e\n2 f\n3 g\n4 h\n").differ(alone))

    def test_a_step_that_is_there_twice_or_not_at_all_is_named(self):
        alone = self.lines("1 a\n2 b\n3 c\n")
        self.assertIn("line 3 of rank 0 is that of step 2", self.lines("1 a\n2 b\n2 b\n3 c\n").differ(alone))
        self.assertIn("line 2 of rank 0 is that of step 3", self.lines("1 a\n3 c\n").differ(alone))

    def test_all_ranks_have_done_as_many_steps_as_the_slowest(self):
        self.assertEqual(self.lines("1 a\n2 b\n", "1 e\n2").count(), 1)

    def test_a_line_is_as_expected_only_with_its_words_and_the_same_bits(self):
        works, refuses = Line("a", "", ()), Line("b", "", (), expected="refused", words="managed memory")
        self.assertTrue(Outcome("works", same=True).expected(works))
        self.assertFalse(Outcome("works", same=False).expected(works))
        self.assertFalse(Outcome("lost", "managed memory").expected(refuses))
        self.assertTrue(Outcome("refused", "managed memory is not supported", same=True).expected(refuses))
        self.assertFalse(Outcome("refused", "no room", same=True).expected(refuses))
        self.assertTrue(Outcome("SKIP", "no second GPU").expected(works))

    def test_a_row_has_all_columns_and_can_be_in_a_table(self):
        row = Outcome("refused", "a | b\nc", same=True).row(LINES[0])
        self.assertEqual((len(row), row[2], row[3], row[-1]), (len(HEAD), "refused", "yes", "a / b c"))
        self.assertIn("eager: a / b c", text([row]))

    def test_lines_are_spread_over_the_gpus(self):
        slots = Slots(["0", "1"], 4)
        self.assertEqual([slots.take(1), slots.take(1), slots.take(2)], [["0"], ["1"], ["0", "1"]])
        slots.give(["0"], 1)
        self.assertEqual(slots.take(1), ["0"])

    def test_names_and_ports_are_of_one_line_each(self):
        for lines in LINES, SELF_TEST:
            self.assertEqual(len({line.name for line in lines}), len(lines))
            ports = [line.port + more for line in lines for more in (0, 1, 10, 11, 20, 21)]
            self.assertEqual(len(set(ports)), len(ports))

    def test_nccl_is_left_to_a_rekindle_that_sees_to_it(self):
        self.assertEqual((nccl({"gpu.nccl"}), set(nccl(set()))), ({}, {"NCCL_P2P_DISABLE", "NCCL_CUMEM_HOST_ENABLE"}))


if __name__ == "__main__":
    unittest.main()
