//! Writes a synthetic model as files that any engine loads.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::ops::Range;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use serde_json::json;
use tokenizers::decoders::byte_level::ByteLevel as ByteLevelDecoder;

use super::{Synthetic, tokenizer, var_builder};
use crate::decoder::{Progress, check_dtype};
use crate::error::{ModelError, Result};

/// Bytes after which a weight file is closed: what is in memory at a time.
const SHARD: usize = 2 << 30;

impl Synthetic {
    /// Writes the model to the new or empty directory `directory`: `config.json`, `tokenizer.json`, the weights as
    /// safetensors of `dtype` under Hugging Face names, in files of about 2 GiB, and their index. The weights are made
    /// on `device` and are those that loading the same model there gives. `progress` is called after each tensor with
    /// the number written and the number of all. Returns the bytes of the weights.
    ///
    /// # Errors
    /// [`ModelError::WrongInput`] if the directory holds files; [`ModelError::Write`]; those of [`var_builder`].
    pub fn save(
        &self,
        directory: &Path,
        dtype: DType,
        device: &Device,
        mut progress: Option<&mut Progress<'_>>,
    ) -> Result<usize> {
        let dtype = check_dtype(dtype)?;
        let config = self.shape.config()?;
        let vb = var_builder(&config, self.profile, self.seed, dtype, device)?;
        fs::create_dir_all(directory).map_err(|e| ModelError::write(directory, e))?;
        if fs::read_dir(directory).map_err(|e| ModelError::write(directory, e))?.next().is_some() {
            let got = format!("{} with files in it", directory.display());
            return Err(ModelError::input("the directory of a saved model", "a new or an empty one", got));
        }
        let bytes = |shape: &[usize]| shape.iter().product::<usize>() * dtype.size_in_bytes();
        let write = |name: &str, text: &str| {
            let path = directory.join(name);
            fs::write(&path, text).map_err(|e| ModelError::write(&path, e))
        };
        write("config.json", &self.shape.json()?)?;
        let mut tokenizer = tokenizer(config.vocab_size)?;
        // mistral.rs takes no tokenizer without a decoder of bytes.
        tokenizer.with_decoder(Some(ByteLevelDecoder::new(false, true, true)));
        write("tokenizer.json", &tokenizer.to_string(false).map_err(ModelError::tokenizer)?)?;

        let shapes = config.tensor_shapes();
        let sizes: Vec<usize> = shapes.iter().map(|(_, shape)| bytes(shape)).collect();
        let shards = shards(&sizes, SHARD);
        let mut weight_map = BTreeMap::new();
        let mut written = 0;
        for (number, shard) in shards.iter().enumerate() {
            let file = format!("model-{:05}-of-{:05}.safetensors", number + 1, shards.len());
            let mut tensors: HashMap<String, Tensor> = HashMap::new();
            for (name, shape) in &shapes[shard.clone()] {
                tensors.insert(name.clone(), vb.get(shape.as_slice(), name)?.to_device(&Device::Cpu)?);
                weight_map.insert(name, file.clone());
                written += 1;
                if let Some(progress) = &mut progress {
                    progress(written, shapes.len());
                }
            }
            let path = directory.join(&file);
            candle_core::safetensors::save(&tensors, &path).map_err(|e| ModelError::write(&path, e))?;
        }
        let total = sizes.iter().sum();
        let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
        write("model.safetensors.index.json", &index.to_string())?;
        Ok(total)
    }
}

/// Ranges of consecutive tensors of together at most `limit` bytes; a larger tensor is alone.
fn shards(sizes: &[usize], limit: usize) -> Vec<Range<usize>> {
    let (mut shards, mut start, mut size) = (Vec::new(), 0, 0);
    for (tensor, &bytes) in sizes.iter().enumerate() {
        if tensor > start && size + bytes > limit {
            shards.push(start..tensor);
            (start, size) = (tensor, 0);
        }
        size += bytes;
    }
    shards.push(start..sizes.len());
    shards
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_is_full_at_the_limit() {
        assert_eq!(shards(&[4, 6, 1, 12, 3], 10), [0..2, 2..3, 3..4, 4..5]);
        assert_eq!(shards(&[12, 10], 10), [0..1, 1..2]);
        assert_eq!(shards(&[5, 5, 1], 10), [0..2, 2..3]);
    }
}
