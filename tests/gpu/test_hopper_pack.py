"""Packed NVFP4 words on the device: the interpreter's checks on compiled kernels, both decodes."""

from tests.interpreter.test_hopper_pack import (  # noqa: F401
    test_a_product_with_packed_weights,
    test_decodes_every_code_under_every_scale,
    test_orders_in_kernels_are_the_hosts,
    test_sums_over_part_of_the_columns_and_output_in_order,
)
