"""TensorFlow's cases: what its tests assert, and what became of each here.

`python tests/tensorflow_cases.py` writes tests/tensorflow_cases.md from this table. Tests carry the
rows that they hold at the beginning of their names: `test_H13_H14_...`.

The letters stand for kinds of rows: A values and options, B cross-device ops in one process, C
`MultiWorkerAllReduce`, D graph algorithms, E utilities, F collectives across processes, G raw
collective ops, H `reduce`, `all_reduce` and gradients, I the default ops, J variables and updates,
K gather, cluster configuration and Keras, L what TensorFlow did when it was run.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS / "tensorflow_cases.md"

PASSES = "passes"
DIFFERS = "differs on purpose"
NO_MEANING = "no meaning in JAX"


@dataclasses.dataclass(frozen=True)
class Case:
    """One behaviour of TensorFlow.

    Attributes:
      source: the test that asserts it; of part L what was run, on which version, and its result.
      here: what became of it.
      words: more about that.
      by: tests that hold it without its number in their names.
    """

    source: str
    here: str
    words: str = ""
    by: tuple[str, ...] = ()


HEAD = """\
# TensorFlow's cases

For those who port tests; everybody else can skip this page. Of {all} behaviours that TensorFlow's tests assert,
or that it showed when it was run (rows L; 2.4 and 2.21 unless said otherwise), {passes} pass, {differs} differ on purpose, and
{no_meaning} have no meaning in JAX. Below are those that differ; `tests/tensorflow_cases.py` has all and makes this page.

"""


def carried(name: str) -> list[str]:
    """The rows that a test's name begins with."""
    found = re.match(r"test_((?:[A-L]\d+_)+)", name)
    return found[1].rstrip("_").split("_") if found else []


def every_test() -> Iterator[str]:
    """The names of all tests there are."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield node.name


def by_case_carried() -> dict[str, list[str]]:
    """The tests that carry each case in their names."""
    found: dict[str, list[str]] = {}
    for name in every_test():
        for case in carried(name):
            found.setdefault(case, []).append(name)
    return found


def page() -> str:
    """The page, as it should be: the cases that differ, and how many there are of each kind."""
    count = Counter(case.here for case in CASES.values())
    alike: dict[str, list[str]] = {}
    for name, case in CASES.items():
        if case.here == DIFFERS:
            alike.setdefault(case.words, []).append(name)
    lines = ["| rows | TensorFlow | here |", "| --- | --- | --- |"]
    for words, names in alike.items():
        sources = "; ".join(dict.fromkeys(CASES[name].source for name in names))
        lines.append(f"| {', '.join(names)} | {sources} | {words} |")
    head = HEAD.format(
        all=len(CASES), passes=count[PASSES], differs=count[DIFFERS], no_meaning=count[NO_MEANING]
    )
    return head + "\n".join(lines) + "\n"


ALL = ("test_every_reduction_is_numpys_on_every_destination",)

# fmt: off
CASES = {
    "A1": Case("collective_util_test OptionsTest.testCreateOptionsViaExportedAPI", PASSES),
    "A2": Case("collective_util_test OptionsTest.testCreateOptionsViaExportedAPI", PASSES),
    "A4": Case("per_replica_test testTypeSpec", NO_MEANING, "there are no type specs; a value's type is its tree and its arrays' shapes and dtypes (see A5, A7)"),
    "A5": Case("testTypeSpecRoundTrip", PASSES),
    "A7": Case("testDoesNotTriggerFunctionTracing", PASSES),
    "A8": Case("testFunctionCanReturnPerReplica", PASSES),
    "A10": Case("testCondWithValuesNotConvertibleToTensor", PASSES),
    "A11": Case("testUsePerReplicaInvalidContextGivesError", DIFFERS, "arithmetic on a `PerReplica` is a `TypeError`; converting one stacks it"),
    "A13": Case("testMakeDistributedValueSingleNumpyArrayConstant", PASSES),
    "A14": Case("testMakeDistributedValueNestedStructurePerReplica", PASSES),
    "A16": Case("distribute_utils_test testNested", PASSES, "there is no \"mirrored selector\": `value[i]` is the one there is"),
    "A17": Case("testWrapClass", PASSES),
    "A19": Case("testOneDevice", DIFFERS, "the value of one replica keeps its wrapper"),
    "A20": Case("testWrapAListOfTwoTuples", PASSES),
    "A22": Case("mirrored_strategy_test testRunRegroupError", DIFFERS, "a structure cannot depend on the replica: JAX's `TypeError`, or a `ValueError` from `PerReplica`"),
    "A23": Case("strategy_common_test StrategyLocalResultTest (8 tests)", PASSES),
    "B1": Case("testReductionAndBroadcast", PASSES, by=ALL),
    "B2": Case("testReductionAndBroadcast", PASSES, by=ALL),
    "B4": Case("testReductionAndBroadcast", PASSES, by=ALL),
    "B5": Case("testReductionAndBroadcast", PASSES, by=ALL),
    "B7": Case("testReductionAndBroadcast", PASSES, by=ALL),
    "B8": Case("testReductionAndBroadcast", PASSES),
    "B9": Case("testIndexedSlicesReduce", PASSES),
    "B10": Case("testIndexedSlicesAllReduce", PASSES),
    "B11": Case("testIndexedSlicesAllReduce", PASSES),
    "B13": Case("testChooseAlgorithm", DIFFERS, "`NcclAllReduce` everywhere: one compiled all-reduce, for which XLA brings the transport", by=("test_I1_I2_I5_what_reduces_between_programs",)),
    "B14": Case("testChooseAlgorithm (mocked kernel list)", PASSES, by=("test_I1_I2_I5_what_reduces_between_programs",)),
    "B16": Case("old (1.15/2.0)", DIFFERS, "`NcclAllReduce` everywhere: one compiled all-reduce, for which XLA brings the transport", by=("test_I1_I2_I5_what_reduces_between_programs",)),
    "B17": Case("old contrib testChooseAlgorithm", NO_MEANING, "links between devices are the compiler's business; hierarchical copy is there by name"),
    "B19": Case("old contrib testChooseAlgorithm", NO_MEANING, "links between devices are the compiler's business; hierarchical copy is there by name"),
    "B20": Case("old contrib testChooseAlgorithm", NO_MEANING, "links between devices are the compiler's business; hierarchical copy is there by name"),
    "C1": Case("MultiWorkerCrossDeviceOpsTest.testReductionAndBroadcast \"MultiWorkerAllReduce\"", PASSES, by=ALL),
    "C2": Case("\"...Pack\"", PASSES, by=ALL),
    "C4": Case("\"...MultipleSpecs\"", PASSES, by=ALL),
    "D1": Case("testFlattenTensorsShapesDefined", NO_MEANING, "every shape is known when a program is traced"),
    "D2": Case("testRingPermutations", NO_MEANING, "how TensorFlow wired its ring graph; here the ring visits the replicas in the order of the axes"),
    "D4": Case("testRingPermutations", NO_MEANING, "how TensorFlow wired its ring graph; here the ring visits the replicas in the order of the axes"),
    "D5": Case("testRingPermutations", NO_MEANING, "how TensorFlow wired its ring graph; here the ring visits the replicas in the order of the axes"),
    "D7": Case("testRingPermutations", NO_MEANING, "how TensorFlow wired its ring graph; here the ring visits the replicas in the order of the axes"),
    "D8": Case("testRingPermutations", NO_MEANING, "how TensorFlow wired its ring graph; here the ring visits the replicas in the order of the axes"),
    "D10": Case("testRingPermutations", NO_MEANING, "how TensorFlow wired its ring graph; here the ring visits the replicas in the order of the axes"),
    "D11": Case("testRingPermutations", NO_MEANING, "how TensorFlow wired its ring graph; here the ring visits the replicas in the order of the axes"),
    "D13": Case("testRingPermutations", NO_MEANING, "padding of a ring's parts is inside the program"),
    "D14": Case("testRingAllReduce", PASSES, by=ALL),
    "D16": Case("testRecursiveHDAllReduce", PASSES, by=ALL),
    "E1": Case("testAggregateTensors", PASSES, by=ALL),
    "E2": Case("testAggregateIndexedSlices", PASSES, by=ALL),
    "E4": Case("testDivideIndexedSlices", PASSES, by=ALL),
    "E5": Case("testIsIndexedSlices", PASSES),
    "E7": Case("testCopyIndexedSlicesNoDenseShape", PASSES),
    "E8": Case("GroupBySizeTest.testPreferLargerPack", DIFFERS, "the limit is a ceiling; one dtype per pack"),
    "E10": Case("testUnknownShape", NO_MEANING, "every shape is known when a program is traced"),
    "F1": Case("testReduceDense", PASSES, by=ALL),
    "F2": Case("testReduceDense", PASSES, by=ALL),
    "F4": Case("testReduceDense", PASSES, by=ALL),
    "F5": Case("testReduceDense", PASSES, by=ALL),
    "F7": Case("testReduceDense", PASSES, by=ALL),
    "F8": Case("testReduceDense", PASSES, by=ALL),
    "F10": Case("testBatchReduceDense", PASSES, by=ALL),
    "F11": Case("testBatchReduceDense", PASSES, by=ALL),
    "F13": Case("testBatchReduceSparse (SUM, traced)", PASSES, by=ALL),
    "F14": Case("testBatchReduceSparse (SUM, traced)", PASSES, by=ALL),
    "F16": Case("testAllReduceDense", PASSES),
    "F17": Case("testAllReduceDense", PASSES),
    "F19": Case("testAllReduceDense", PASSES),
    "F20": Case("testAllReduceMixedDenseAndSparse", PASSES, by=ALL),
    "F22": Case("testCollectiveV2ControlFlow", PASSES),
    "F23": Case("testMultiThreadedCollectiveLaunchNoInterleave", PASSES),
    "F25": Case("testTimeoutReduceDense", PASSES, by=("test_a_late_process_is_named_with_the_collective_that_waits",)),
    "F26": Case("testTimeoutBatchReduceDense", PASSES, by=("test_a_late_process_is_named_with_the_collective_that_waits",)),
    "F28": Case("testTimeoutBatchReduceSparse", PASSES, by=("test_a_late_process_is_named_with_the_collective_that_waits",)),
    "F29": Case("testNcclOrdering", NO_MEANING, "XLA orders the collectives of a program itself"),
    "F31": Case("testReduceIndexedSlicesDistributed, fixed length", PASSES, by=ALL),
    "F32": Case("testReduceIndexedSlicesDistributed, fixed length, 2 devices each", PASSES, by=ALL),
    "F34": Case("testReductionLocal", PASSES, by=ALL),
    "F35": Case("testReduceIndexedSlicesLocal", PASSES, by=ALL),
    "G1": Case("collective_ops_test testCollectiveReduce", PASSES),
    "G2": Case("testFp16Reduce (CPU, and GPU in collective_ops_gpu_test)", PASSES),
    "G4": Case("testCollectiveTimeoutV1", PASSES, by=("test_F25_F26_F28_the_deadline_of_a_call_bounds_it_and_the_next_call_works", "test_a_late_process_is_named_with_the_collective_that_waits")),
    "G5": Case("testNcclHintFallbackToRingReduce", PASSES),
    "G7": Case("testWhileWithScopedAllocator", PASSES),
    "G8": Case("testCollectiveReduceScalar", PASSES),
    "G10": Case("testCollectiveBroadcast", PASSES),
    "G11": Case("testCollectiveBroadcastBool", PASSES),
    "G13": Case("testCollectiveGatherShapeMismatch", PASSES),
    "G14": Case("testCollectiveGatherShapeMismatchAcrossDevices", PASSES),
    "G16": Case("testCollectiveGatherShapeCheckFailure", PASSES, by=("test_a_dimension_that_is_not_there_is_refused_by_name", "test_what_reduce_and_gather_are_given_is_checked")),
    "G17": Case("testCollectiveGatherShapeCheckFailure test, second half", NO_MEANING, "there are no group or instance keys; a group is a mesh axis"),
    "G19": Case("kernel_tests/collective_ops_test testReduce", PASSES),
    "G20": Case("testGather", PASSES, by=("test_it_is_concatenation_in_replica_order_to_the_bit",)),
    "G22": Case("testAllToAll", NO_MEANING, "an all-to-all is not part of the face: `jax.lax.all_to_all` is there"),
    "G23": Case("testInstanceKeyScopedUnderGroupKey", PASSES),
    "G25": Case("testCollectiveInvalidKey", NO_MEANING, "there are no group or instance keys; a group is a mesh axis"),
    "G26": Case("testMultipleGroups", PASSES),
    "G28": Case("GroupAssignmentTest", PASSES),
    "G29": Case("TimeoutTest.testTimeout", PASSES, by=("test_F25_F26_F28_the_deadline_of_a_call_bounds_it_and_the_next_call_works", "test_a_late_process_is_named_with_the_collective_that_waits")),
    "G31": Case("testExecutionAfterTimeout", DIFFERS, "after a deadline the process stays usable", by=("test_F25_F26_F28_the_deadline_of_a_call_bounds_it_and_the_next_call_works",)),
    "G32": Case("CommunicationHintTest.testNCCLFallbackOnCPU", PASSES),
    "G34": Case("OpCancellationTest NotAbortIfNoCollective", PASSES),
    "G35": Case("testCancelDuringParamResolutionV2", NO_MEANING, "no participant of a compiled program is cancelled alone"),
    "G37": Case("InvalidInputTest", NO_MEANING, "there are no group or instance keys; a group is a mesh axis"),
    "G38": Case("CollectiveOpsV3Test", NO_MEANING, "an all-to-all is not part of the face: `jax.lax.all_to_all` is there"),
    "G40": Case("CollectiveOpTest.testCheckHealth", NO_MEANING, "no process is asked how it is: the coordinator watches all of them"),
    "G41": Case("testCheckHealthPeerDown", DIFFERS, "a process that is missing or lost is a `PeerLostError` on all others", by=("test_one_that_dies_before_all_are_here_is_named_at_once",)),
    "G43": Case("testCheckHealthInvalidPeer", NO_MEANING, "no process is asked how it is, so none is named wrongly"),
    "G44": Case("collective_ops_gpu_test testInt32Error", DIFFERS, "integers are reduced on every platform", by=("test_every_reduction_is_numpys_on_every_destination",)),
    "G46": Case("testCollectiveDeviceMismatch", NO_MEANING, "a mesh has one kind of device"),
    "G47": Case("testNcclStress", PASSES),
    "G49": Case("testAllSumGrad", PASSES),
    "G50": Case("testErrors", PASSES),
    "H1": Case("strategy_common_test ReduceTest.testBasic", PASSES),
    "H2": Case("testAxis", PASSES),
    "H4": Case("testReduceToCpuNested", PASSES),
    "H5": Case("testReduceAxisToCpu", PASSES, "a mean of integers is float32, JAX's default float"),
    "H7": Case("distribute_lib_test testReductions_acceptStringOps", PASSES),
    "H8": Case("testReduceMeanAxis", PASSES),
    "H10": Case("(decorator of H8-H9)", PASSES),
    "H11": Case("strategy_test_lib two-device all_reduce SUM", PASSES),
    "H13": Case("SUM gradients (graph and tape)", PASSES),
    "H14": Case("MEAN gradients", PASSES),
    "H16": Case("strategy_common_test AllReduceTest.testDense", PASSES),
    "H17": Case("testSparse", PASSES),
    "H19": Case("testNestedInput", PASSES),
    "H20": Case("ReplicaCtxAllReduceTest testDense/testSparse/testNestedInput", PASSES, "there is one entry, and it is the replica's"),
    "H22": Case("vars_test OnReadVariableSyncTest.testAllReduce", PASSES),
    "H23": Case("strategy_common_test testReduceHostTensor", PASSES, "a plain value is one of each process", by=("test_every_worker_makes_the_same_calls_and_gets_its_part_of_the_results",)),
    "H25": Case("testReduceDeviceTensors / ReduceTo / BatchReduceTo", PASSES, by=("test_every_worker_makes_the_same_calls_and_gets_its_part_of_the_results",)),
    "H26": Case("collective_all_reduce_strategy_test testReduceToCpu", PASSES),
    "H28": Case("_test_minimize_loss (graph and eager)", PASSES, "with optax; the new weights come out of `run` as `Mirrored`"),
    "H29": Case("custom_training_loop_gradient_test testStepInFunctionGradient / testRunInFunctionGradient", PASSES),
    "H31": Case("testMirroredVariableAsStopGradient", PASSES, "in meaning: JAX's stopped gradient is 0 where TensorFlow's is None"),
    "H32": Case("mirrored_strategy_test testCallAndMergeExceptions", PASSES, "for the replica function; there is no `merge_call` to raise in"),
    "H34": Case("testFunctionInCallForEachReplicaCached", PASSES),
    "H35": Case("strategy_common_test testMergeCallInitScope", NO_MEANING, "there is no `merge_call`; a reduction stands where it is needed, inside `cond` and `scan` too"),
    "H37": Case("test_deep_copy_not_allowed", DIFFERS, "a strategy can be copied", by=("test_a_strategy_can_be_shown_and_copied",)),
    "H38": Case("testStrategyInitializationError", DIFFERS, "what is not a resolver is refused"),
    "H40": Case("testUpdateConfigProto", NO_MEANING, "no session, no config proto"),
    "I1": Case("MirroredCollectiveOpTest.testAllCpu", DIFFERS, "`NcclAllReduce` everywhere: one compiled all-reduce, for which XLA brings the transport"),
    "I2": Case("testMixedDevices", DIFFERS, "the same default; JAX refuses a mesh over two platforms"),
    "I4": Case("testVirtualGpu", NO_MEANING, "JAX has no virtual GPUs"),
    "I5": Case("MirroredGetCrossDeviceOpTest.testGpusCollectiveOp", PASSES, "what the user passes is used between programs; inside `run` options decide"),
    "J1": Case("mirrored_strategy_test testAssignMirroredVarReplicaContext", PASSES, "as an expression: `w = all_reduce(\"mean\", x)`; there are no variables"),
    "J2": Case("mirrored_strategy_test testAssignMirroredVarReplicaContext WithSingleValue", PASSES, "as an expression"),
    "J4": Case("mirrored_strategy_test testAssignMirroredVarReplicaContext WithSingleValue", PASSES, "as an expression"),
    "J5": Case("testAssignSubMirroredVarReplicaContext", PASSES, "as an expression"),
    "J7": Case("testAssignSubMirroredVarReplicaContext WithoutAggregationType", DIFFERS, "without a reduction the result is a `PerReplica`; nothing called `Mirrored` diverges"),
    "J8": Case("testAssignAddMirroredVarCrossDeviceContext", PASSES, "with `extended.update`"),
    "J10": Case("OnWrite scatter: testScatterSub", PASSES, "as an expression, `w - all_reduce(\"mean\", slices).to_dense()`"),
    "J11": Case("testScatterAdd", PASSES, "as an expression"),
    "J13": Case("SyncOnReadVariableAssignTest SUM", PASSES, "for reading, as `strategy.reduce(\"sum\", value, None)`; assigning has no meaning without variables"),
    "J14": Case("SyncOnReadVariableAssignTest SUM MEAN", PASSES, "for reading, as `strategy.reduce(\"mean\", value, None)`; assigning has no meaning without variables"),
    "J16": Case("testAssignWithAggregationSum", NO_MEANING, "nothing is assigned, so nothing is divided to be summed again"),
    "J17": Case("testAssignAddSubWithAggregationSum", NO_MEANING, "nothing is assigned"),
    "J19": Case("testAssignDtypeConversion", NO_MEANING, "a new value has the dtype it is computed in"),
    "J20": Case("strategy_common_test ReplicaCtxUpdateTest.testDenseUpdate", PASSES, "as expressions"),
    "J22": Case("mirrored_values_test testAddOp", DIFFERS, "a `Mirrored` is a pytree, not an array; its `tree` is the array", by=("test_A11_outside_a_distributed_value_is_no_array",)),
    "K1": Case("testGatherPerReplicaDense1D0Axis / testAllGather...", PASSES),
    "K2": Case("2D0Axis", PASSES),
    "K4": Case("3D0Axis / 3D1Axis / 3D2Axis", PASSES),
    "K5": Case("DiffShapeAtAxis0", PASSES, "for `gather`; inside `run` no meaning in JAX: a compiled program has one shape for all replicas"),
    "K7": Case("RaiseDiffShapeAtNonAxis", PASSES, "as a `ValueError` with both shapes"),
    "K8": Case("RaiseDifferentRank", PASSES, "as a `ValueError` with both shapes"),
    "K10": Case("testAllGatherNest", PASSES, "with equal sizes; uneven sizes inside `run`: as K5"),
    "K11": Case("testAllGatherNest1D0Axis", PASSES),
    "K12": Case("testAllGatherGradient", PASSES),
    "K13": Case("testAllGatherGradientNest", PASSES),
    "K14": Case("tfconfig_cluster_resolver_test testNormalClusterSpecRead", PASSES),
    "K16": Case("testAutomaticMasterRead / testSpecifiedTaskTypeAndIndexMasterRead", PASSES),
    "K17": Case("testSessionMasterRead / testRpcLayerRead", PASSES, "for `rpc_layer`; there are no sessions, so `session_master` is not read"),
    "K19": Case("testTaskTypeCastToString / testTaskIndexCastToInteger", PASSES),
    "K20": Case("testZeroItems... / testOneItemInClusterSpecMasterRead", PASSES),
    "K22": Case("testZeroItems... / testOneItemInClusterSpecMasterRead, errors", PASSES),
    "K23": Case("mwms_peer_failure_test PeerFailureTest.test_creating_variable", PASSES, "the error is `PeerLostError`, and names the process", by=("test_the_dead_and_the_stopped_are_named_on_every_survivor_which_go_on",)),
    "K25": Case("PeerFailureRecoverTest.test_creating_variable", PASSES, "with `jaxcoll launch --restarts`", by=("test_a_job_that_has_failed_is_started_again_whole",)),
    "K26": Case("PeerFailureRecoverTest.test_reduce_small_tensor", PASSES, "with `jaxcoll launch --restarts`", by=("test_a_worker_that_died_is_started_again_and_taken_in",)),
    "K28": Case("Keras 3 optimizer_distribute_test test_single_step", PASSES),
    "K29": Case("test_weight_decay", NO_MEANING, "weight decay is optax's, and is applied once"),
    "K31": Case("test_ema", DIFFERS, "a captured gradient counts once per replica, so the SUM is twice that of Keras' test", by=("test_H11_H16_H22_L35_a_value_counts_once_a_replica_wherever_it_was_made",)),
    "K32": Case("test_gradient_accumulation", PASSES),
    "L1": Case("int32 MEAN → float64", DIFFERS, "JAX's default float (float32)", by=ALL),
    "L2": Case("2.4 and 2.21: one-device: float16 1, 2 MEAN → 1.5 float16", PASSES),
    "L3": Case("float16 60000 and 60000, MEAN → inf", DIFFERS, "it does not overflow where the mean fits"),
    "L4": Case("2.4 and 2.21: one-device: bool SUM → InvalidArgumentError", PASSES),
    "L5": Case("2.4 and 2.21: one-device: float32 and float64 on two replicas; shapes [2] and [1] → InvalidArgumentError each", PASSES),
    "L7": Case("2.4 and 2.21: one-device, reduce_to_device CPU:3: 1, 3 SUM, destinations own devices → 4.0 Mirrored on the destinations", PASSES),
    "L8": Case("2.4 and 2.21: any: 2 inputs, 3 destination devices → 4.0 Mirrored on 3", PASSES, by=ALL),
    "L10": Case("2.4 and 2.21: any: destinations \"\", list, 3, None → ValueError", PASSES),
    "L11": Case("2.4 / 2.21: one-device: value 5.0 (Python) → ValueError / 5.0", PASSES, by=ALL),
    "L13": Case("batch_reduce of [], 3, [[P,P]], [(P,P,P)] → IndexError, TypeError, ValueError twice", DIFFERS, "an empty batch is an empty list; every malformed one is a ValueError"),
    "L14": Case("2.4 and 2.21: batch_reduce of plain tensors to their own device: 1., 2. → plain 1., 2.", PASSES),
    "L16": Case("hierarchical copy of 1, 10, 100 on 3 devices → 11 (third device lost)", DIFFERS, "no device is lost: 111", by=ALL),
    "L17": Case("2.4 and 2.21: hierarchical copy, 4 devices: 1, 10, 100, 1000 → 1111", PASSES, by=ALL),
    "L19": Case("1.14: 10 elements in 3, 11 in 4, 2 in 8 parts → 3,3,4; 2,2,2,5; 0x7 then 2", DIFFERS, "packs differ by one element at most", by=("test_num_packs_gives_that_many_of_near_equal_size",)),
    "L20": Case("three of 100 B, limit 100 → packs of 2+1; three of 4 B, limit 0 → 3", DIFFERS, "the limit is a ceiling in bytes, as documented"),
    "L22": Case("2.21: 4, 8, 12 B, traced, limit 12 → 5,1 elements (list reversed first)", DIFFERS, "packs close before the limit, in the order of the arrays"),
    "L23": Case("2.21, eager: limit 0 → one collective per tensor, order 3,2,1", DIFFERS, "as L22, in every mode"),
    "L25": Case("2.21: same, limit 1, or eager:  → 4.0 and 3.0", PASSES, by=ALL),
    "L26": Case("collective: int32 1,2 MEAN → 1.5 float64", DIFFERS, "1.5 as float32", by=ALL),
    "L28": Case("2.4: collective sparse, traced, lengths 1 and 2 → rows for all indices", DIFFERS, "sparse stays sparse, as in 2.21"),
    "L29": Case("2.21: same: SUM / MEAN → IS([[1,2],[3,4],[5,6]];[1,1,3]) / halves of it (exact layout)", PASSES, "the exact layout after `without_padding()`"),
    "L31": Case("2.4 / 2.21: same, eager:  → RuntimeError / works", PASSES, by=ALL),
    "L32": Case("2.4 and 2.21: collective gather: [1.] and [2.,3.] axis 0 → [1,2,3]", PASSES),
    "L34": Case("2.4 and 2.21: one-device gather: [[1.]] and [[2.,3.]] axis -1 → [[1,2,3]]", PASSES),
    "L35": Case("Mirrored: all_reduce SUM of a constant captured from outside → 1.0 (not 2.0)", DIFFERS, "a value counts once per replica, wherever it was made"),
    "L37": Case("2.21: 2 processes: captured constant → 2.0", PASSES, "what is captured counts once for each replica", by=("test_every_worker_makes_the_same_calls_and_gets_its_part_of_the_results",)),
    "L38": Case("2.4 and 2.21: Mirrored 2D: all_reduce of {\"a\":1,\"b\":(2,[3])} SUM → {\"a\":2,\"b\":(4,[6])}", PASSES, by=ALL),
    "L40": Case("2.4 / 2.21: Mirrored 2D: two int32 values r+1, r+2; int32 with float → (3, 5), works / ValueError both", PASSES, by=ALL),
    "L41": Case("2.4 and 2.21: Mirrored 2D eager: float32 1 and float16 2 in one call → 2.0 and 4.0, dtypes kept", PASSES),
    "L43": Case("2.4 / 2.21: Mirrored 2D: sparse 1@0 of [5,1] SUM → dense [2,0,0,0,0] / sparse [[1],[1]]@[0,0]", PASSES, by=ALL),
    "L44": Case("2.4 / 2.21: gradient of a sparse all_reduce → 4.0 / None", DIFFERS, "it has the derivative of the dense reduction"),
    "L46": Case("Mirrored reduce of plain 1.0: SUM, MEAN → ValueError, 1.0", DIFFERS, "a plain value is its own MEAN and has no SUM over one process's replicas; both are errors"),
    "L47": Case("2.4 / 2.21: Mirrored reduce of Python 0, SUM → 0 / AttributeError", DIFFERS, "as L46; a Python 0 is its own sum"),
    "L49": Case("2.4 and 2.21: reduce axis 0: [1,2,3] and [4,5] → SUM 15; MEAN 3.0; int input [1,2,4],[4,5] MEAN 3.2 float64", PASSES, "an integer mean is float32"),
    "L50": Case("2.4 / 2.21: reduce MEAN axis (0,1): 2x2 matrices 1..4 and 5..8 → TypeError / 4.5; SUM 36 in both", PASSES),
    "L52": Case("2.4 and 2.21: variable aggregation SUM / MEAN / NONE, replica assigns r+1:  → 3.0 / 1.5 / 1.0 and 2.0", NO_MEANING, "there are no variables"),
    "L53": Case("2.4 and 2.21: replicas make different numbers of all_reduce calls:  → RuntimeError", NO_MEANING, "all replicas run one program, so they make the same calls"),
    "L55": Case("2.4 eager / 2.4 traced / 2.21: all_reduce SUM of mirrored variable 3.0, R=2:  → 3.0 / 6.0 / 6.0", NO_MEANING, "there are no variables"),
    "L56": Case("2.21: after one mismatched all_reduce all later ones fail, with its message", DIFFERS, "the bad value alone is refused; nothing is disabled"),
    "L58": Case("2.21: 2 processes, values 1 and 2: Strategy.reduce of host tensor; of Python float → SUM 3.0, MEAN 1.5; 3.0", PASSES, by=("test_every_worker_makes_the_same_calls_and_gets_its_part_of_the_results",)),
    "L59": Case("2.21: 2 processes, all_gather of ones(r+1) → three ones", DIFFERS, "a compiled program has one shape; between programs `strategy.gather` takes unequal parts", by=("test_every_worker_makes_the_same_calls_and_gets_its_part_of_the_results",)),
    "L61": Case("2.21: 2 processes, bool SUM; int32 1 and 2 SUM:  → InvalidArgumentError; 3", PASSES, "for integers; a bool has no sum, in one process or several", by=("test_every_worker_makes_the_same_calls_and_gets_its_part_of_the_results",)),
    "L62": Case("2.21: reduce_to with timeout 2 s, one process absent → DeadlineExceededError; the next call fails at once", DIFFERS, "the same error; afterwards the process stays usable"),
    "L64": Case("2.4 and 2.21: same without clipping:  → -2.0", NO_MEANING, "Keras optimizers; `jc.value_and_grad` gives reduced gradients to any"),
    "L65": Case("2.4: experimental_aggregate_gradients=False:  → components 1.0 and -3.0", NO_MEANING, "Keras optimizers; `jc.value_and_grad` gives reduced gradients to any"),
    "L67": Case("1.14: 2 workers x 2 CPUs; pscpu/pscpu, pscpu, xring with M = 1, 2; shapes (8) and (4,4): arange + 100k + device → exact sums on all 4", PASSES, by=ALL),
    "L68": Case("1.14: xring M=2 shape (7,13); xring scalar; pscpu M=2 length 7; pscpu M=2 scalar:  → exact", PASSES, by=ALL),
    "L70": Case("1.14: nccl/xring with 2 shards, nccl/rechd with 3 workers → ValueError", DIFFERS, "what was a ValueError works", by=ALL),
    "L71": Case("1.14: two specs → list order becomes 4,4,64,64 for 64,4,64,4", DIFFERS, "limits are bytes, and results keep their order"),
    "L73": Case("1.14: spec list not ending in -1 → AssertionError in use", DIFFERS, "ValueError when it is made"),
    "L74": Case("1.14: malformed specs → TypeError, ValueError or empty", DIFFERS, "the valid forms as there; every malformed one is a ValueError"),
    "L76": Case("1.14: sizes 2,2,100,2,2,2 floats, 40 B, group 10:  → packed list lengths 4, 6, 100 (indices 0-1, 3-5, 2)", PASSES),
    "L77": Case("1.14: sizes 2,100,2 → nothing packed; float16 not packed", DIFFERS, "float16 too; groups as documented"),
    "L79": Case("1.14: grouping of aux devices a..f by 2; a..e by 2; a,b by 3:  → (a,d)(b,e)(c,f); (a,d)(b,e)(c,a); ValueError", NO_MEANING, "there are no auxiliary devices; a worker's inner algorithm needs none"),
    "L80": Case("1.14: padded split 10/4, 9/4, 5/4, 3/4; ragged split 10/4, 9/4, 3/4:  → 3x4 pad 2, 3x4 pad 3, 2x4 pad 3, 1x4 pad 1; 2,2,2,4 and 2,2,2,3 and 0,0,0,3", PASSES, by=ALL),
    "L82": Case("1.14: NcclAllReduce(0), (-1) → AssertionError; HierarchicalCopyAllReduce(-1) accepted", DIFFERS, "0 is accepted as in 2.x, the rest is a ValueError"),
    "L83": Case("NcclAllReduce(1.5) → accepted", DIFFERS, "1.5 is a ValueError too"),
}
# fmt: on

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
