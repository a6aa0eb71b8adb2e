"""Transformers: its Trainer on a GPT-2 of one layer, with random weights and tokens."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)
tokens = torch.randint(32, (64, 12))
data = [{"input_ids": row, "labels": row} for row in tokens]
config = GPT2Config(
    vocab_size=32, n_positions=12, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
)
model = GPT2LMHeadModel(config)
arguments = TrainingArguments(
    output_dir="trained",
    per_device_train_batch_size=4,
    num_train_epochs=2,
    learning_rate=0.01,
    use_cpu=True,
    ddp_backend="gloo",
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=data)
loss = trainer.train().training_loss
if trainer.is_world_process_zero():
    weights = torch.nn.utils.parameters_to_vector(model.parameters())
    print("RESULT", weights.norm().item() + loss)
trainer.accelerator.end_training()
