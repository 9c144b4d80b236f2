class QuantizedTensor:
    """No tensor is one: FP8 is off."""
