"""Primitives: what each of JAX's primitives is, told once for all analyses of jaxprs.

A primitive that stands among the unknown, or nowhere, is unknown to each analysis: it has no rule
there. ``tests/jaxprs/test_primitives.py`` finds those of the installed JAX that stand nowhere.
"""

import enum


class OpKind(enum.Enum):
    """What a primitive does, in a word."""

    ELEMENTWISE = "each element is computed from the elements in its place"
    MOVE = "elements are copied, by positions that are parameters"
    CHOOSE = "elements are copied or added up, by positions that are inputs"
    REDUCE = "elements along axes are put together, or in order"
    CONTRACT = "products are added up"
    MATRIX = "matrices in the last two axes are solved or factored"
    DRAW = "it is about random numbers or their keys"
    MAKE = "something is made of nothing, or asked"
    PASS = "what comes in goes out"
    COLLECTIVE = "what other devices have is put together, along named axes"
    CALL = "it runs jaxprs"
    KERNEL = "it runs what no jaxpr shows to an analysis"
    UNKNOWN = "no rule, or it writes to references"


_TABLE = {
    OpKind.ELEMENTWISE: """
        abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
        bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos
        cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a
        igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min
        mul ne neg nextafter not one_minus_square or polygamma population_count pow real
        reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left
        shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan
        tanh xor zeta""",
    OpKind.MOVE: """
        broadcast_in_dim concatenate pad reshape rev slice split squeeze stack tile transpose
        unstack""",
    OpKind.CHOOSE: """
        dynamic_slice dynamic_update_slice gather scatter scatter-add scatter-max scatter-min
        scatter-mul scatter-sub scatter_add""",
    OpKind.REDUCE: """
        approx_top_k argmax argmin cumlogsumexp cummax cummin cumprod cumsum reduce reduce_and
        reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_window reduce_window_max
        reduce_window_min reduce_window_sum reduce_xor select_and_gather_add select_and_scatter
        select_and_scatter_add sort top_k""",
    OpKind.CONTRACT: """
        conv_general_dilated dot_general fft ragged_dot_general""",
    OpKind.MATRIX: """
        cholesky cholesky_update eig eigh geqp3 geqrf hessenberg householder_product lu
        lu_pivots_to_permutation ormqr qr schur svd symmetric_product triangular_solve tridiagonal
        tridiagonal_solve""",
    OpKind.DRAW: """
        prng_join prng_random_bits prng_seed prng_split random_bits random_clone random_fold_in
        random_gamma random_seed random_split random_unwrap random_wrap rng_bit_generator
        rng_uniform threefry2x32 threefry4x32""",
    OpKind.MAKE: """
        axis_index dim_as_value dimension_size empty empty2 iota iota_2x32_shape num_programs
        platform_index program_id zeros_like""",
    OpKind.PASS: """
        device_put layout_constraint mesh_cast name optimization_barrier pcast pvary reshard
        sharding_constraint""",
    OpKind.COLLECTIVE: """
        all_gather all_gather_invariant all_gather_reduced all_to_all pbroadcast pmax pmin ppermute
        precv preduced psend psum psum2 psum_invariant ragged_all_to_all reduce_scatter
        unreduced_pmax unreduced_pmin unreduced_psum unreduced_reduce_scatter
        all_gather_done all_gather_reduced_start all_gather_start all_to_all_done all_to_all_start
        pbroadcast_done pbroadcast_start ppermute_done ppermute_start psum_done
        psum_invariant_start psum_start reduce_scatter_done reduce_scatter_start
        unreduced_psum_start unreduced_reduce_scatter_start""",
    OpKind.CALL: """
        call call_exported closed_call composite compute_on cond core_call custom_jvp_call
        custom_jvp_call_jaxpr custom_lin custom_linear_solve custom_vjp_call
        custom_vjp_call_jaxpr custom_vmap_call eval_jaxpr jaxpr_call jit linear_call mpmd_map pjit
        remat remat2 remat_opt run_scoped run_state scan shard_map while xla_metadata_call""",
    OpKind.KERNEL: """
        buffer_callback core_map cudnn_fusion custom_fusion custom_partitioning
        dot_product_attention_bwd dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd
        dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd
        dot_product_attention_fp8_fwd_wrapper dot_product_attention_fwd
        dot_product_attention_fwd_wrapper emit_pipeline ffi_call fusible io_callback mosaic_gpu_p
        pallas_call pipeline_body pure_callback scaled_dot scaled_matmul scaled_matmul_wrapper
        tpu_custom_call""",
    # Read in November 2026, in JAX 0.10.2 and 0.11.2.
    OpKind.UNKNOWN: """
        accum_grad_in_ref add_dependency addupdate after_all bcoo_dot_general
        bcoo_dot_general_sampled bcoo_extract bcoo_fromdense bcoo_sort_indices bcoo_spdot_general
        bcoo_sum_duplicates bcoo_todense bcoo_transpose bcsr_dot_general bcsr_extract
        bcsr_fromdense bcsr_todense bitcast box_get box_set broadcast_to call_hi_primitive
        call_hi_primitive_linearized check conv coo_fromdense coo_matmat coo_matvec coo_spmm
        coo_spmv coo_todense create_linear create_token csr_fromdense csr_matmat csr_matvec
        csr_spmm csr_spmv csr_todense dce_sink debug_callback debug_print delay dma_start dma_wait
        einshape_lo empty_ref free_ref freeze from_edtype get get_barrier_semaphore get_global
        global_array_to_host_local_array host_local_array_to_global_array
        inspect_sharding log_extend log_read masked_load masked_swap matmul_acc_lhs
        matmul_lhs_fifo matmul_pop matmul_pop_fifo matmul_push_rhs mulhi multiple_of new_box
        new_log new_ref pack_dtype pack_elementwise philox2x32 philox4x32 pin
        program_order reciprocal reduced_vary_cast_p relayout remove_memory_space roll
        semaphore_read semaphore_signal semaphore_wait shape_assertion shard_alike spsolve stage
        stochastic_round swap tie to_edtype todense trace_value unpack_dtype unpack_elementwise
        unpin unreachable vary_unreduced_cast_p with_memory_space_constraint xla_metadata_value""",
}
KINDS = {name: kind for kind, names in _TABLE.items() for name in names.split()}


def of_kind(*kinds: OpKind) -> frozenset[str]:
    """The primitives of these kinds.

    >>> sorted(of_kind(OpKind.CONTRACT))
    ['conv_general_dilated', 'dot_general', 'fft', 'ragged_dot_general']
    """
    return frozenset(name for name, kind in KINDS.items() if kind in kinds)


# What is known of primitives besides, across the kinds.

ELEMENTWISE = of_kind(OpKind.ELEMENTWISE)
# What keeps a sum a sum, if all else that it takes is free of the batch.
LINEAR = of_kind(OpKind.MOVE) | set(
    "conj convert_element_type copy copy_p cumsum imag neg real reduce_precision reduce_sum "
    "stop_gradient".split()
)
ADDS = frozenset({"add", "add_any", "sub"})
# What changes no element.
MOVES = frozenset("broadcast_in_dim convert_element_type copy copy_p reshape stop_gradient".split())
# Inputs that choose elements; all others are copied, or added up.
CHOOSES: dict[str, slice] = {
    "dynamic_slice": slice(1, None),
    "dynamic_update_slice": slice(2, None),
    "gather": slice(1, 2),
    "scatter": slice(1, 2),
    "scatter-add": slice(1, 2),
    "scatter_add": slice(1, 2),
    "select_n": slice(0, 1),
}
# Whose outcome is multiplied by what all that they take is multiplied by.
HOMOGENEOUS = (
    LINEAR
    | ADDS
    | set(CHOOSES)
    | set("abs cummax cummin max min reduce_max reduce_min sort".split())
    | set("reduce_window_max reduce_window_min reduce_window_sum select_and_scatter_add".split())
)
# Which make integers of integers.
OF_COUNTS = (
    LINEAR
    | ADDS
    | set(CHOOSES)
    | set("abs dot_general max min mul reduce_max reduce_min sign square".split())
)
# Whose outcome is the same for any positive multiple of what they take.
OF_SIGN = frozenset("argmax argmin eq ge gt is_finite le lt ne sign".split())
# Of zeros alone they make zeros.
OF_ZEROS = frozenset(
    "add add_any broadcast_in_dim concatenate convert_element_type mul neg reshape squeeze sub "
    "transpose".split()
)
# Of two inputs, of which JAX repeats a number as often as the other has elements.
BINARY = frozenset(
    "add add_any sub mul div rem pow max min atan2 nextafter and or xor eq ne lt le gt ge".split()
)
# Whose parameter ``axes`` says along which axes they work.
REDUCTIONS = frozenset(
    "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum "
    "reduce_xor".split()
)
# Along one axis, which is this parameter.
ALONG_ONE = {
    "concatenate": "dimension",
    "cumlogsumexp": "axis",
    "cummax": "axis",
    "cummin": "axis",
    "cumprod": "axis",
    "cumsum": "axis",
    "sort": "dimension",
}
# Of matrices in the last two axes.
OF_MATRICES = frozenset(
    "cholesky eigh geqrf householder_product lu lu_pivots_to_permutation qr svd "
    "triangular_solve".split()
)
# What lets slices along an axis meet, where it works along that.
MIXES = frozenset(
    "argmax argmin cumlogsumexp cummax cummin cumprod cumsum dot_general fft reduce_max reduce_min "
    "reduce_prod reduce_xor rev top_k".split()
)
PASSES = of_kind(OpKind.PASS)
# The collectives that add up, or compare, over the shards.
OVER_SHARDS = frozenset("pmax pmin psum psum2 psum_invariant".split())
# Those whose output is equal on all devices along their axes.
EQUALIZES = frozenset({"psum", "pmax", "pmin", "all_gather"})
# What makes numbers, and not only keys.
DRAWS = frozenset("random_bits random_gamma rng_bit_generator rng_uniform threefry2x32".split())
# Which input is the key, or what a key is made of; None where no rule says what is drawn of rows.
KEYS: dict[str, int | None] = dict.fromkeys(of_kind(OpKind.DRAW)) | dict.fromkeys(
    "random_bits random_clone random_fold_in random_gamma random_seed random_split random_unwrap "
    "random_wrap".split(),
    0,
)
