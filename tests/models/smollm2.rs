//! SmolLM2-135M from a real GGUF file. `scripts/fetch-smollm2.sh` fetches it; `S2O_SMOLLM2` names it.

use s2o_models::{GenerationOptions, LoadOptions, ModelSource, PrefillOptions, TextStream};

use crate::fixtures::PlainDense;

#[test]
fn completes_a_sentence() {
    let Some(path) = std::env::var_os("S2O_SMOLLM2") else {
        println!("not run: S2O_SMOLLM2 is not set; `scripts/fetch-smollm2.sh target/models` fetches the file");
        return;
    };
    let source: ModelSource = path.to_str().unwrap().parse().unwrap();
    let model = source.load(&LoadOptions::default(), None).unwrap();
    assert_eq!(model.num_parameters(), 134_515_008);

    // As the model's own tokenizer.json encodes them.
    let known: [(&str, &[u32]); 3] = [
        ("The capital of France is", &[504, 3575, 282, 4649, 314]),
        ("2024", &[34, 32, 34, 36]),
        ("<|im_start|>user\n", &[1, 4093, 198]),
    ];
    for (text, expected) in known {
        assert_eq!(model.encode(text).unwrap(), expected, "{text:?}");
    }
    for text in [
        "  leading",
        "tabs\tand\n\nlines  ",
        "naïve café 日本語 🦀🎉",
        "x=12345; y = {6}",
        "it's they'll",
        "",
    ] {
        let ids = model.encode(text).unwrap();
        assert_eq!(model.decode_text(&ids).unwrap(), text);
        let mut stream = TextStream::new(&model.tokenizer);
        let mut streamed: String = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
        assert!(!streamed.contains('\u{fffd}'), "half a character came out of {text:?}");
        streamed.push_str(&stream.finish().unwrap());
        assert_eq!(streamed, text);
    }

    let prompt = model.encode("The capital of France is").unwrap();
    let mut cache = model.decoder.new_cache(1, 64).unwrap();
    let options = GenerationOptions {
        max_new_tokens: 12,
        ..Default::default()
    };
    let prefill = PrefillOptions::new();
    let out = model
        .generate(&prompt, &mut cache, &PlainDense, prefill, &options, &mut |_| ())
        .unwrap();
    println!("The capital of France is{}", out.text);
    assert!(out.text.contains("Paris"), "{:?}", out.text);
}
