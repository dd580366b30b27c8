"""Allowlist: what a configuration may name without the user's word. It is data: a module, and names in it.

Every class here takes plain values, and objects that are themselves on the list. None of them runs, imports or
unpickles what its arguments name; those that write files are in `FOLDERS` and `FILES`, and those that read files in
`INPUTS`, so that their paths are checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

PACKAGES = ("sparse_lightning", "torch", "lightning", "torchmetrics")
"""The packages of the list. Nothing else is imported for a name that the user does not trust."""

CLOSED = tuple(f"{PACKAGES[0]}.{room}" for room in ("app", "compat", "demo", "moved"))
"""Modules of this package that no configuration may name, not even for what they import from others."""

ALLOWED: dict[str, str] = {
    # This package
    "sparse_lightning": (
        "SparsityCallback SparseModelCheckpoint Blocks Coupled Custom Experts Filters Heads NM Neurons Strided "
        "BlockCoupling BlockSpec ScopeCoupling ScopeSpec Constant Cosine Cubic Cyclic Exponential Join Linear OneShot "
        "Steps ERK Global LAMP Uniform Gradual Proximal PruneOnce RigL SET Soft AdamFisher AverageTaylor EMA "
        "ElementwiseTaylor Fisher Gradient Magnitude Movement OBS Random Refit Sensitivity Shrink Taylor Wanda "
        "BlockSparsity MaskChurn MaskOverlap Layout"
    ),
    "sparse_lightning.models": "DigitsConv DigitsMLP DigitsViT GPT HlbCifar10 HuggingFace TextClassifier",
    "sparse_lightning.data": "Cifar10 Digits FashionMnist LabelledText StdlibText TextFile",
    "sparse_lightning.export": "Compact KeptBlocks ONNX SemiStructured Tiled Weights",
    "sparse_lightning.callbacks.strategy": "Sharded",
    "sparse_lightning.report.metrics_file": "MetricsFile",
    # Lightning
    "lightning": "Trainer",
    "lightning.pytorch.callbacks": (
        "DeviceStatsMonitor EMAWeightAveraging EarlyStopping GradientAccumulationScheduler LearningRateMonitor "
        "ModelCheckpoint ModelSummary RichModelSummary RichProgressBar StochasticWeightAveraging TQDMProgressBar Timer "
        "WeightAveraging"
    ),
    "lightning.pytorch.loggers": "CSVLogger TensorBoardLogger",
    "lightning.pytorch.plugins": "DoublePrecision HalfPrecision MixedPrecision Precision TorchSyncBatchNorm",
    "lightning.pytorch.strategies": "DDPStrategy ModelParallelStrategy SingleDeviceStrategy",
    # torch: modules and losses
    "torch.nn": (
        "AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveLogSoftmaxWithLoss AdaptiveMaxPool1d "
        "AdaptiveMaxPool2d AdaptiveMaxPool3d AlphaDropout AvgPool1d AvgPool2d AvgPool3d BCELoss BCEWithLogitsLoss "
        "BatchNorm1d BatchNorm2d BatchNorm3d Bilinear CELU CTCLoss ChannelShuffle CircularPad1d CircularPad2d "
        "CircularPad3d ConstantPad1d ConstantPad2d ConstantPad3d Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d "
        "ConvTranspose3d CosineEmbeddingLoss CosineSimilarity CrossEntropyLoss CrossMapLRN2d Dropout Dropout1d "
        "Dropout2d Dropout3d ELU Embedding EmbeddingBag FeatureAlphaDropout Flatten Fold FractionalMaxPool2d "
        "FractionalMaxPool3d GELU GLU GRU GRUCell GaussianNLLLoss GroupNorm Hardshrink Hardsigmoid Hardswish Hardtanh "
        "HingeEmbeddingLoss HuberLoss Identity InstanceNorm1d InstanceNorm2d InstanceNorm3d KLDivLoss L1Loss LPPool1d "
        "LPPool2d LPPool3d LSTM LSTMCell LayerNorm LeakyReLU Linear LocalResponseNorm LogSigmoid LogSoftmax MSELoss "
        "MarginRankingLoss MaxPool1d MaxPool2d MaxPool3d MaxUnpool1d MaxUnpool2d MaxUnpool3d Mish ModuleDict "
        "ModuleList MultiLabelMarginLoss MultiLabelSoftMarginLoss MultiMarginLoss MultiheadAttention NLLLoss PReLU "
        "PairwiseDistance PixelShuffle PixelUnshuffle PoissonNLLLoss RMSNorm RNN RNNCell RReLU ReLU ReLU6 "
        "ReflectionPad1d ReflectionPad2d ReflectionPad3d ReplicationPad1d ReplicationPad2d ReplicationPad3d SELU "
        "Sequential SiLU Sigmoid SmoothL1Loss SoftMarginLoss Softmax Softmax2d Softmin Softplus Softshrink Softsign "
        "SyncBatchNorm Tanh Tanhshrink Threshold Transformer TransformerDecoder TransformerDecoderLayer "
        "TransformerEncoder TransformerEncoderLayer TripletMarginLoss Unflatten Unfold Upsample UpsamplingBilinear2d "
        "UpsamplingNearest2d ZeroPad1d ZeroPad2d ZeroPad3d"
    ),
    "torch.nn.functional": "gelu relu silu",
    # torch: optimizers, learning rates, data
    "torch.optim": (
        "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax LBFGS Muon NAdam RAdam RMSprop Rprop SGD SparseAdam"
    ),
    "torch.optim.lr_scheduler": (
        "ConstantLR CosineAnnealingLR CosineAnnealingWarmRestarts CyclicLR ExponentialLR LinearLR MultiStepLR "
        "OneCycleLR PolynomialLR ReduceLROnPlateau StepLR"
    ),
    "torch.utils.data": "DataLoader",
    # torchmetrics, without metrics that download or load models
    "torchmetrics": "CatMetric MaxMetric MeanMetric MetricCollection MinMetric RunningMean RunningSum SumMetric",
    "torchmetrics.classification": (
        "AUROC ROC Accuracy AveragePrecision CalibrationError CohenKappa ConfusionMatrix ExactMatch F1Score FBetaScore "
        "HammingDistance HingeLoss JaccardIndex MatthewsCorrCoef Precision PrecisionRecallCurve Recall Specificity "
        "StatScores BinaryAUROC BinaryAccuracy BinaryAveragePrecision BinaryCalibrationError BinaryCohenKappa "
        "BinaryConfusionMatrix BinaryF1Score BinaryFBetaScore BinaryHammingDistance BinaryHingeLoss BinaryJaccardIndex "
        "BinaryMatthewsCorrCoef BinaryPrecision BinaryPrecisionRecallCurve BinaryROC BinaryRecall BinarySpecificity "
        "BinaryStatScores MulticlassAUROC MulticlassAccuracy MulticlassAveragePrecision MulticlassCalibrationError "
        "MulticlassCohenKappa MulticlassConfusionMatrix MulticlassExactMatch MulticlassF1Score MulticlassFBetaScore "
        "MulticlassHammingDistance MulticlassHingeLoss MulticlassJaccardIndex MulticlassMatthewsCorrCoef "
        "MulticlassPrecision MulticlassPrecisionRecallCurve MulticlassROC MulticlassRecall MulticlassSpecificity "
        "MulticlassStatScores MultilabelAUROC MultilabelAccuracy MultilabelAveragePrecision MultilabelConfusionMatrix "
        "MultilabelCoverageError MultilabelExactMatch MultilabelF1Score MultilabelFBetaScore MultilabelHammingDistance "
        "MultilabelJaccardIndex MultilabelMatthewsCorrCoef MultilabelPrecision MultilabelPrecisionRecallCurve "
        "MultilabelROC MultilabelRankingAveragePrecision MultilabelRankingLoss MultilabelRecall MultilabelSpecificity "
        "MultilabelStatScores"
    ),
    "torchmetrics.image": "PeakSignalNoiseRatio StructuralSimilarityIndexMeasure TotalVariation",
    "torchmetrics.regression": (
        "ConcordanceCorrCoef CosineSimilarity ExplainedVariance KLDivergence KendallRankCorrCoef LogCoshError "
        "MeanAbsoluteError MeanAbsolutePercentageError MeanSquaredError MeanSquaredLogError MinkowskiDistance "
        "PearsonCorrCoef R2Score RelativeSquaredError SpearmanCorrCoef SymmetricMeanAbsolutePercentageError "
        "TweedieDevianceScore WeightedMeanAbsolutePercentageError"
    ),
    "torchmetrics.segmentation": "GeneralizedDiceScore MeanIoU",
    "torchmetrics.text": "CharErrorRate EditDistance MatchErrorRate Perplexity WordErrorRate WordInfoLost",
}
"""Module → the names in it that a `_target_` may name."""

FOLDERS: dict[str, str] = {
    "lightning.Trainer": "default_root_dir",
    "lightning.pytorch.callbacks.ModelCheckpoint": "dirpath",
    "sparse_lightning.SparseModelCheckpoint": "dirpath",
    "lightning.pytorch.loggers.CSVLogger": "save_dir",
    "lightning.pytorch.loggers.TensorBoardLogger": "save_dir",
    "sparse_lightning.report.metrics_file.MetricsFile": "folder",
}
"""Arguments that are folders to write to."""

FILES: dict[str, str] = {
    "lightning.pytorch.callbacks.ModelCheckpoint": "filename",
    "sparse_lightning.SparseModelCheckpoint": "filename",
    "lightning.pytorch.loggers.CSVLogger": "name version",
    "lightning.pytorch.loggers.TensorBoardLogger": "name version sub_dir filename_suffix",
    "sparse_lightning.export.Compact": "file",
    "sparse_lightning.export.KeptBlocks": "file",
    "sparse_lightning.export.ONNX": "file",
    "sparse_lightning.export.SemiStructured": "file",
    "sparse_lightning.export.Tiled": "file",
    "sparse_lightning.export.Weights": "file",
}
"""Arguments that are names of files or folders inside of such a folder."""

INPUTS: dict[str, str] = {
    "sparse_lightning.data.Cifar10": "folder",
    "sparse_lightning.data.FashionMnist": "folder",
    "sparse_lightning.data.LabelledText": "path tokenizer",
    "sparse_lightning.data.TextFile": "path tokenizer",
    "sparse_lightning.models.HuggingFace": "path",
    "sparse_lightning.models.TextClassifier": "path",
}
"""Arguments that are files or folders to read."""

UPLOADS: dict[str, str] = {"lightning.Trainer": "model_registry"}
"""Arguments by which a model leaves the machine."""

_HOMES: dict[str, list[str]] = {}
for _home, _names in ALLOWED.items():
    for _name in _names.split():
        _HOMES.setdefault(_name, []).append(_home)


def homes(name: str) -> list[str]:
    """Return the modules of the list that have a name.

    Example:
        >>> homes("Precision"), homes("system")
        (['lightning.pytorch.plugins', 'torchmetrics.classification'], [])
    """
    return _HOMES.get(name, [])


def listed_name(thing: Any, name: str = "") -> str | None:
    """Return the dotted name under which an object is on the list; None for any other object.

    Objects are compared by identity, so an alias counts as what it stands for.

    Args:
        thing: a class or function.
        name: the last part of the name by which it was found, for functions that do not know their own.

    Example:
        >>> import os, torch
        >>> listed_name(torch.nn.modules.linear.Linear), listed_name(os.system), listed_name(torch.load)
        ('torch.nn.Linear', None, None)
    """
    for known in dict.fromkeys((str(getattr(thing, "__qualname__", "")), name)):
        for home in homes(known):
            if getattr(import_module(home), known, None) is thing:
                return f"{home}.{known}"
    return None


def is_within(path: str, prefixes: Iterable[str]) -> bool:
    """Whether a dotted name is one of the prefixes, or inside of one.

    Example:
        >>> is_within("torch.nn.Linear", ["torch"]), is_within("torch_evil.Linear", ["torch"])
        (True, False)
    """
    return any(path == prefix or path.startswith(f"{prefix}.") for prefix in prefixes)
