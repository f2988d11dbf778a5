"""Tests of the stock suite that are not run, each with its reason, and the part that every change is tested with.

A test that is in no list runs. Of the reasons, `SKIPPED` holds for any backend of CPU tensors, as a run over Gloo shows; `OURS` says what
shared memory does not offer and `GLOO` what Gloo does not, which is run as the reference only.
"""

from __future__ import annotations

NEEDS_NCCL = "asks for NCCL by name: its process group, its error texts or its profiler events"
NEEDS_GPU = "about a GPU itself: streams, events or device numbers"
NO_CPU_SYNC_BATCH_NORM = "torch.nn.SyncBatchNorm has no CPU path"
TWIN = "its twin without _cuda in the name is run; here the CPU would stand in for the GPU and nothing else would differ"
BROKEN = "PyTorch itself skips it, and it fails over Gloo too"

SKIPPED: dict[str, tuple[str, ...]] = {
    NEEDS_NCCL: (
        "test_batch_isend_irecv_mixed_backend_err",
        "test_ddp_profiling_execution_trace",
        "test_monitored_barrier_allreduce_hang",
        "test_monitored_barrier_allreduce_hang_wait_all_ranks",
        "test_nccl_high_priority_stream",
        "test_send_recv_nccl",
        "test_send_recv_nccl_autograd_profiler",
        "test_send_recv_nccl_torch_profiler",
    ),
    NEEDS_GPU: (
        "test_DistributedDataParallel_non_default_stream",
        "test_ddp_apply_optim_in_backward",
        "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false",
        "test_ddp_apply_optim_in_backward_ignored_params",
        "test_ddp_device",
        "test_ddp_logging_data_gpu",
        "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none",
        "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none",
        "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none",
        "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none",
        "test_stateless_api_with_ddp",
    ),
    NO_CPU_SYNC_BATCH_NORM: (
        "test_DistributedDataParallel_SyncBatchNorm",
        "test_DistributedDataParallel_SyncBatchNorm_2D_Input",
        "test_DistributedDataParallel_SyncBatchNorm_Channels_Last",
        "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value",
        "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient",
        "test_DistributedDataParallel_SyncBatchNorm_No_Affine",
        "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process",
        "test_DistributedDataParallel_SyncBatchNorm_half",
        "test_ddp_uneven_inputs_stop_iteration_sync_bn",
        "test_sync_bn_logged",
        "test_ddp_inference",
        "test_ddp_sync_bn_training_vs_eval",
    ),
    TWIN: (
        "test_all_gather_cuda",
        "test_all_gather_cuda_complex",
        "test_all_reduce_sum_cuda",
        "test_all_reduce_sum_cuda_async",
        "test_all_reduce_sum_cuda_complex",
        "test_all_to_all_cuda",
        "test_all_to_all_cuda_complex",
        "test_all_to_all_full_group_cuda",
        "test_all_to_all_group_cuda",
        "test_all_to_all_single_equal_split_cuda",
        "test_all_to_all_single_equal_split_cuda_complex",
        "test_all_to_all_single_equal_split_full_group_cuda",
        "test_all_to_all_single_equal_split_group_cuda",
        "test_all_to_all_single_unequal_split_cuda",
        "test_all_to_all_single_unequal_split_cuda_complex",
        "test_all_to_all_single_unequal_split_full_group_cuda",
        "test_all_to_all_single_unequal_split_group_cuda",
        "test_barrier_cuda",
        "test_barrier_full_group_cuda",
        "test_barrier_group_cuda",
        "test_broadcast_cuda",
        "test_gather_cuda",
        "test_reduce_sum_cuda",
        "test_reduce_sum_cuda_twice",
        "test_scatter_cuda",
        "test_scatter_cuda_complex",
        "test_sparse_all_reduce_sum_cuda",
    ),
    "needs torchvision": ("test_SyncBatchNorm_process_group",),
    BROKEN: (
        "test_DistributedDataParallel",
        "test_barrier_timeout_arg",
        "test_ddp_has_finalized",
        "test_ddp_hook_pickling_powerSGD",
    ),
}
OURS: dict[str, tuple[str, ...]] = {
    "torch.distributed.monitored_barrier refuses every backend but Gloo; all barriers here name the ranks that are missing": (
        "test_monitored_barrier_failure_order",
        "test_monitored_barrier_gloo",
        "test_monitored_barrier_gloo_rank_0_timeout",
        "test_monitored_barrier_gloo_subgroup",
        "test_monitored_barrier_wait_all_ranks",
    ),
    "counts profiler events named after the backend, which a process group written in Python does not emit": (
        "test_ddp_profiling_autograd_profiler",
        "test_ddp_profiling_torch_profiler",
    ),
    "dense tensors only": ("test_sparse_all_reduce_sum",),
    "a rank sends nothing to itself, as over Gloo": ("test_batch_isend_irecv_nccl", "test_batch_isend_irecv_self_nccl"),
    "lists of unequal tensors, which PyTorch promises for NCCL alone": ("test_all_gather_v_cuda", "test_reduce_scatter_v_cuda"),
}
GLOO: dict[str, tuple[str, ...]] = {
    "Gloo exchanges lists of equal tensors only": (
        "test_all_to_all",
        "test_all_to_all_complex",
        "test_all_to_all_full_group",
        "test_all_to_all_group",
        "test_all_gather_v_cuda",
    ),
    "Gloo sends nothing to itself": ("test_batch_isend_irecv_nccl", "test_batch_isend_irecv_self_nccl"),
    "Gloo wants the first dimension of a gathered or scattered tensor to be the ranks'": (
        "test_all_gather_into_stack_tensor_cuda",
        "test_reduce_scatter_tensor_cuda",
    ),
}


def reasons(backend: str) -> dict[str, str]:
    """Why each test that is not run over a backend is not."""
    lists = [SKIPPED, {"shm": OURS, "gloo": GLOO}[backend]]
    return {name: reason for each in lists for reason, names in each.items() for name in names}


# One of each kind, and what has broken before: point-to-point with tags and any source, groups, complex numbers, objects, DDP.
CHOSEN = (
    "test_get_backend",
    "test_destroy_group",
    "test_get_rank_size_full_group",
    "test_new_subgroups_by_enumeration",
    "test_barrier_timeout_global",
    "test_coalescing_manager_async",
    "test_batch_isend_irecv_gloo_tags",
    "test_send_recv",
    "test_send_recv_any_source",
    "test_send_recv_with_tag_torch_profiler",
    "test_isend",
    "test_irecv",
    "test_broadcast",
    "test_broadcast_group",
    "test_reduce_group_max",
    "test_reduce_sum_twice",
    "test_all_reduce_sum_async",
    "test_all_reduce_sum_complex",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_group_product",
    "test_all_reduce_full_group_min",
    "test_all_reduce_coalesced_group_sum",
    "test_reduce_scatter_tensor_cuda",
    "test_scatter_group",
    "test_scatter_complex",
    "test_gather_group",
    "test_gather_checks",
    "test_all_gather_group",
    "test_all_gather_complex",
    "test_all_gather_into_stack_tensor_cuda",
    "test_all_gather_coalesced_with_empty",
    "test_all_to_all_single_unequal_split_group",
    "test_all_to_all_full_group",
    "test_all_to_all_complex",
    "test_barrier_group",
    "test_get_future",
    "test_all_gather_object_subgroup",
    "test_gather_object",
    "test_scatter_object_list",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_ddp_create_graph",
    "test_ddp_control_flow_different_across_ranks",
    "test_ddp_join_model_equivalence",
    "test_ddp_broadcast_buffer_via_hook",
    "test_ddp_namedtuple",
    "test_post_localSGD_optimizer_parity",
    "test_3_level_hierarchical_model_averager",
    "test_static_graph_api_cpu",
    "test_ddp_device_mesh_initialization",
)
