"""Tables of JAX's primitives, shared by all analyses of jaxprs.

A primitive that is in no table here is unknown: no analysis has a rule for it. A test lists the
unknown primitives of the installed JAX; a person has looked at each.
"""


def _names(*texts: str) -> frozenset[str]:
    return frozenset(" ".join(texts).split())


# Each element is computed from the elements in its place.
ELEMENTWISE = _names("""
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos
    cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a
    igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min
    mul ne neg nextafter not one_minus_square or polygamma population_count pow real
    reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan
    tanh xor zeta
""")
# Elements are copied, by positions that are parameters.
_MOVES = _names("""
    broadcast_in_dim concatenate pad reshape rev slice split squeeze stack tile transpose
    unstack
""")
# The outputs are the inputs.
PASSES = _names("""
    device_put layout_constraint mesh_cast name optimization_barrier pcast pvary reshard
    sharding_constraint
""")
# They make keys and random numbers, from keys or from what keys are made of.
_RANDOM = _names("""
    prng_join prng_random_bits prng_seed prng_split random_bits random_clone random_fold_in
    random_gamma random_seed random_split random_unwrap random_wrap rng_bit_generator
    rng_uniform threefry2x32 threefry4x32
""")
# They work on matrices in the last two axes.
OF_MATRICES = _names(
    "cholesky eigh geqrf householder_product lu lu_pivots_to_permutation qr svd triangular_solve"
)
# All others that may have a rule: they reduce, contract, choose elements by inputs, create arrays,
# or communicate.
_OTHERS = _names("""
    dynamic_slice dynamic_update_slice gather scatter scatter-add scatter-max scatter-min
    scatter-mul scatter-sub scatter_add argmax argmin cumlogsumexp cummax cummin cumprod cumsum
    reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_window
    reduce_window_max reduce_window_min reduce_window_sum reduce_xor select_and_gather_add
    select_and_scatter select_and_scatter_add sort top_k conv_general_dilated dot_general fft
    axis_index dim_as_value dimension_size empty empty2 iota iota_2x32_shape num_programs
    platform_index program_id zeros_like all_gather all_gather_invariant all_gather_reduced
    all_to_all pbroadcast pmax pmin ppermute precv preduced psend psum psum2 psum_invariant
    ragged_all_to_all reduce_scatter
""")
KNOWN = ELEMENTWISE | _MOVES | PASSES | _RANDOM | OF_MATRICES | _OTHERS

# A sum over rows stays one, if all other inputs are free of the batch.
LINEAR = _MOVES | _names(
    "conj convert_element_type copy copy_p cumsum imag neg real reduce_precision reduce_sum "
    "stop_gradient"
)
ADDS = _names("add add_any sub")
# They change no element, but for a conversion; see ``Pair.converts``.
MOVES = _names("broadcast_in_dim convert_element_type copy copy_p reshape stop_gradient")
# The inputs that choose elements; the elements of all others are copied, or added up.
CHOOSES: dict[str, slice] = {
    "dynamic_slice": slice(1, None),
    "dynamic_update_slice": slice(2, None),
    "gather": slice(1, 2),
    "scatter": slice(1, 2),
    "scatter-add": slice(1, 2),
    "scatter_add": slice(1, 2),
    "select_n": slice(0, 1),
}
# Scaling all inputs by a number scales the output by the same number.
HOMOGENEOUS = (
    LINEAR
    | ADDS
    | set(CHOOSES)
    | _names("abs cummax cummin max min reduce_max reduce_min sort")
    | _names("reduce_window_max reduce_window_min reduce_window_sum select_and_scatter_add")
)
# They make integers from integers.
OF_COUNTS = (
    LINEAR
    | ADDS
    | set(CHOOSES)
    | _names("abs dot_general max min mul reduce_max reduce_min sign square")
)
# Scaling all inputs by a positive number changes nothing.
OF_SIGN = _names("argmax argmin eq ge gt is_finite le lt ne sign")
# If all inputs are zeros, so is the output.
OF_ZEROS = _names(
    "add add_any broadcast_in_dim concatenate convert_element_type mul neg reshape squeeze sub "
    "transpose"
)
# They take two inputs; JAX broadcasts one that is a number to the shape of the other.
BINARY = _names(
    "add add_any sub mul div rem pow max min atan2 nextafter and or xor eq ne lt le gt ge"
)
# Their parameter ``axes`` has the axes along which they work.
REDUCTIONS = _names(
    "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor"
)
# They work along one axis, which is this parameter.
ALONG_ONE = {
    "concatenate": "dimension",
    "cumlogsumexp": "axis",
    "cummax": "axis",
    "cummin": "axis",
    "cumprod": "axis",
    "cumsum": "axis",
    "sort": "dimension",
}
# They combine slices along the axis that they work along.
MIXES = _names(
    "argmax argmin cumlogsumexp cummax cummin cumprod cumsum dot_general fft reduce_max reduce_min "
    "reduce_prod reduce_xor rev top_k"
)
# Collectives that add up, or compare, over the shards.
OVER_SHARDS = _names("pmax pmin psum psum2 psum_invariant")
# Collectives whose output is equal on all devices along their axes.
EQUALIZES = _names("psum pmax pmin all_gather")
# They make random numbers, and not only keys.
DRAWS = _names("random_bits random_gamma rng_bit_generator rng_uniform threefry2x32")
# Which input is the key, or what a key is made of; None where there is no rule for rows.
KEYS: dict[str, int | None] = dict.fromkeys(_RANDOM) | dict.fromkeys(
    "random_bits random_clone random_fold_in random_gamma random_seed random_split random_unwrap "
    "random_wrap".split(),
    0,
)
