"""Operations that stay in high precision, each with the interval of every correct float32 computation."""
