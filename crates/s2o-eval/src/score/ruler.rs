//! RULER's two rules. Both search for references as substrings and ignore case.
//!
//! RULER multiplies their mean by 100; a score in this crate is from 0 to 1.

/// Replaces control characters by line ends, then trims white space.
fn cleaned(prediction: &str) -> String {
    let text: String = prediction.chars().map(|c| if c <= '\x1f' { '\n' } else { c }).collect();
    text.trim().to_lowercase()
}

fn holds(cleaned: &str, reference: &str) -> bool {
    !reference.is_empty() && cleaned.contains(&reference.to_lowercase())
}

/// Share of the references that occur in the prediction; 0 without references. For needles, variables and words.
pub fn string_match_all(prediction: &str, references: &[String]) -> f64 {
    let prediction = cleaned(prediction);
    let found = references.iter().filter(|reference| holds(&prediction, reference)).count();
    if found == 0 { 0.0 } else { found as f64 / references.len() as f64 }
}

/// 1 if any reference occurs in the prediction, otherwise 0. For question answering.
pub fn string_match_part(prediction: &str, references: &[String]) -> f64 {
    let prediction = cleaned(prediction);
    if references.iter().any(|reference| holds(&prediction, reference)) { 1.0 } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn references() -> Vec<String> {
        ["ABCDE", "fghij", "42", "x y"].map(String::from).to_vec()
    }

    #[test]
    fn all_counts_the_found_share() {
        assert_eq!(string_match_all(" abcde FGHIJ 42 x y", &references()), 1.0);
        assert_eq!(string_match_all("1. Abcde\n2. 421", &references()), 0.5);
        assert_eq!(string_match_all("none", &references()), 0.0);
        assert_eq!(string_match_all("", &references()), 0.0);
        assert_eq!(string_match_all("anything", &[]), 0.0);
    }

    #[test]
    fn part_wants_one() {
        assert_eq!(string_match_part("It is fghij.", &references()), 1.0);
        assert_eq!(string_match_part("It is fghi j.", &references()), 0.0);
        assert_eq!(string_match_part("", &references()), 0.0);
        assert_eq!(string_match_part("anything", &[]), 0.0);
    }

    #[test]
    fn control_characters_separate() {
        assert_eq!(string_match_part("x\0y", &["x\ny".to_owned()]), 1.0);
        assert_eq!(string_match_part("x\0y", &["xy".to_owned()]), 0.0);
    }
}
