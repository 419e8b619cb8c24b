"""Primitives: what is known of each of JAX's primitives, told once for all analyses of jaxprs.

What stands in no table here is unknown to each analysis: it has no rule there. A test lists those
of the installed JAX that are unknown, each of which a person has read.
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
# What comes in goes out.
PASSES = _names("""
    device_put layout_constraint mesh_cast name optimization_barrier pcast pvary reshard
    sharding_constraint
""")
# What makes of keys, or of what keys are made of, keys and random numbers.
_RANDOM = _names("""
    prng_join prng_random_bits prng_seed prng_split random_bits random_clone random_fold_in
    random_gamma random_seed random_split random_unwrap random_wrap rng_bit_generator
    rng_uniform threefry2x32 threefry4x32
""")
# Of matrices in the last two axes.
OF_MATRICES = _names(
    "cholesky eigh geqrf householder_product lu lu_pivots_to_permutation qr svd triangular_solve"
)
# All that may have a rule: also what reduces, contracts, chooses elements by inputs, makes
# something of nothing, or puts together what other devices have.
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

# What keeps a sum a sum, if all else that it takes is free of the batch.
LINEAR = _MOVES | _names(
    "conj convert_element_type copy copy_p cumsum imag neg real reduce_precision reduce_sum "
    "stop_gradient"
)
ADDS = _names("add add_any sub")
# What changes no element.
MOVES = _names("broadcast_in_dim convert_element_type copy copy_p reshape stop_gradient")
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
    | _names("abs cummax cummin max min reduce_max reduce_min sort")
    | _names("reduce_window_max reduce_window_min reduce_window_sum select_and_scatter_add")
)
# Which make integers of integers.
OF_COUNTS = (
    LINEAR
    | ADDS
    | set(CHOOSES)
    | _names("abs dot_general max min mul reduce_max reduce_min sign square")
)
# Whose outcome is the same for any positive multiple of what they take.
OF_SIGN = _names("argmax argmin eq ge gt is_finite le lt ne sign")
# Of zeros alone they make zeros.
OF_ZEROS = _names(
    "add add_any broadcast_in_dim concatenate convert_element_type mul neg reshape squeeze sub "
    "transpose"
)
# Of two inputs, of which JAX repeats a number as often as the other has elements.
BINARY = _names(
    "add add_any sub mul div rem pow max min atan2 nextafter and or xor eq ne lt le gt ge"
)
# Whose parameter ``axes`` says along which axes they work.
REDUCTIONS = _names(
    "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor"
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
# What lets slices along an axis meet, where it works along that.
MIXES = _names(
    "argmax argmin cumlogsumexp cummax cummin cumprod cumsum dot_general fft reduce_max reduce_min "
    "reduce_prod reduce_xor rev top_k"
)
# The collectives that add up, or compare, over the shards.
OVER_SHARDS = _names("pmax pmin psum psum2 psum_invariant")
# Those whose output is equal on all devices along their axes.
EQUALIZES = _names("psum pmax pmin all_gather")
# What makes numbers, and not only keys.
DRAWS = _names("random_bits random_gamma rng_bit_generator rng_uniform threefry2x32")
# Which input is the key, or what a key is made of; None where no rule says what is drawn of rows.
KEYS: dict[str, int | None] = dict.fromkeys(_RANDOM) | dict.fromkeys(
    "random_bits random_clone random_fold_in random_gamma random_seed random_split random_unwrap "
    "random_wrap".split(),
    0,
)
