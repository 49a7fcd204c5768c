"""Trains a small language model, initialised at random, with the Trainer of Hugging Face's transformers: AdamW, dropout and
two DataLoader workers, on tokens made up here. The same bits every time.

    matrix_trainer.py --out DIR
"""

import os

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
from matrix_steps import Steps, digest, options
from transformers import AutoModelForCausalLM, GPT2Config, Trainer, TrainerCallback, TrainingArguments

TOKENS, LENGTH, SAMPLES = 512, 64, 512


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, number):
        ids = torch.randint(TOKENS, (LENGTH,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": ids, "labels": ids}


class Written(Trainer):
    """Keeps the loss of a step, for its line."""

    loss = None

    def training_step(self, *args, **kwargs):
        self.loss = super().training_step(*args, **kwargs)
        return self.loss


class Lines(TrainerCallback):
    def __init__(self, steps):
        self.steps, self.trainer = steps, None

    def on_step_end(self, args, state, control, model=None, **kwargs):
        weights = digest(*(p.detach().cpu().numpy().tobytes() for p in model.parameters()))
        if self.steps.done(self.trainer.loss.item(), weights):
            control.should_training_stop = True
        return control


def main():
    args = options()
    # What it has no deterministic way for, it warns of: two uninterrupted runs are compared then.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(7)
    config = GPT2Config(
        vocab_size=TOKENS, n_positions=LENGTH, n_embd=256, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
    )
    # The backward pass of the other ways of attention is not deterministic everywhere.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    how = TrainingArguments(
        output_dir=str(args.out / "trainer"), max_steps=1_000_000, per_device_train_batch_size=16, learning_rate=1e-4,
        lr_scheduler_type="constant", logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True,
        seed=7, dataloader_num_workers=2, use_cpu=args.device == "cpu",
    )  # fmt: skip
    lines = Lines(Steps(args))
    lines.trainer = Written(model=model, args=how, train_dataset=Sentences(), callbacks=[lines])
    lines.trainer.train()


if __name__ == "__main__":
    main()
