"""Megatron names these in annotations. Only TEFusedMLP builds one, which our layer specs do not choose."""


class Sequential: ...


class FusibleOperation: ...
