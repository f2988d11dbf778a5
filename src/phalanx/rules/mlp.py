"""Names of the dimensions of the residual MLP."""

NAMES = {
    "in_proj.weight": "embed inputs",
    "in_proj.bias": "embed",
    "*.up_proj.weight": "mlp embed",
    "*.up_proj.bias": "mlp",
    "*.down_proj.weight": "embed mlp",
    "*.down_proj.bias": "embed",
    "*norm.weight": "embed",
    "*norm.bias": "embed",
    "head.weight": "outputs embed",
    "head.bias": "outputs",
}
INPUTS = {"x": "batch inputs", "targets": "batch"}
