//! Verdict of a comparison with another exact attention, as text.

use candle_core::DType;

use super::rows::Row;

/// Largest relative L1 difference of two exact implementations: they round 16-bit outputs and weights differently.
fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2f64.powi(-7),
        DType::F16 => 2f64.powi(-10),
        _ => 1e-5,
    }
}

/// A line for each method that was compared with `reference`.
pub fn lines(rows: &[Row], reference: &str, dtype: DType) -> Vec<String> {
    let mut methods: Vec<&str> = Vec::new();
    for row in rows.iter().filter(|row| row.method != reference) {
        if !methods.contains(&row.method.as_str()) {
            methods.push(&row.method);
        }
    }
    let seconds = |method: &str| -> f64 {
        rows.iter().filter(|row| row.is_total() && row.method == method).map(|row| row.seconds).sum()
    };
    let by_error = |a: &&Row, b: &&Row| a.rel_l1.total_cmp(&b.rel_l1);
    let line = |method: &str| {
        let own = || rows.iter().filter(|row| row.method == method);
        let total = own().filter(|row| row.is_total()).max_by(by_error)?;
        let head = own().filter(|row| !row.is_total()).max_by(by_error)?;
        let (error, within) = (total.rel_l1, rounding(dtype));
        let relation = if error <= within {
            format!(
                "agrees with {reference} to {error:.1e} relative L1, within {} rounding ({within:.1e})",
                dtype.as_str()
            )
        } else {
            format!("differs from {reference} by {error:.1e} relative L1")
        };
        let worst = format!("most in layer {} head {} ({:.1e})", head.layer, head.head, head.rel_l1);
        Some(format!("{method} {relation}, {worst}; it is {:.2}x as fast", seconds(reference) / seconds(method)))
    };
    methods.into_iter().filter_map(line).collect()
}
