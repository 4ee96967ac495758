from lightning_lockstep.demo.byte_gpt import ByteGPT as ByteGPT
from lightning_lockstep.demo.cnn import ConvNet as ConvNet
from lightning_lockstep.demo.digits import DigitsData as DigitsData
from lightning_lockstep.demo.global_batch_sampler import GlobalBatchSampler as GlobalBatchSampler
from lightning_lockstep.demo.source_text import SourceTextData as SourceTextData
