"""Operations in high precision, with the interval of the results of correct float32 kernels."""
