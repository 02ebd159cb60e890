//! Mean and variance of the finite rows of a matrix, per column.

use pulp::Arch;

/// Sums of the differences from the first row, in f64. The subtraction keeps a single sweep accurate enough.
#[derive(Debug)]
pub(super) struct Moments {
    first: Vec<f32>,
    sum: Vec<f64>,
    square: Vec<f64>,
    rows: usize,
}

impl Moments {
    pub(super) fn new(columns: usize) -> Self {
        Self { first: vec![0.0; columns], sum: vec![0.0; columns], square: vec![0.0; columns], rows: 0 }
    }

    pub(super) fn add(&mut self, row: &[f32]) {
        // A non-finite query must not spoil the key order of its segment.
        if !Arch::new().dispatch(|| row.iter().all(|x| x.is_finite())) {
            return;
        }
        if self.rows == 0 {
            self.first.copy_from_slice(row);
        }
        self.rows += 1;
        let Self { first, sum, square, .. } = self;
        Arch::new().dispatch(|| {
            for (((&x, &first), sum), square) in row.iter().zip(&*first).zip(sum).zip(square) {
                let distance = f64::from(x) - f64::from(first);
                *sum += distance;
                *square += distance * distance;
            }
        });
    }

    /// Mean and variance over the rows, or zeros if there are no rows.
    pub(super) fn finish(&self) -> (Vec<f64>, Vec<f64>) {
        let count = self.rows.max(1) as f64;
        let mean = self.first.iter().zip(&self.sum).map(|(&first, sum)| f64::from(first) + sum / count).collect();
        let var = self
            .sum
            .iter()
            .zip(&self.square)
            .map(|(sum, square)| (square / count - (sum / count).powi(2)).max(0.0))
            .collect();
        (mean, var)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn far_from_zero_the_variance_survives() {
        let mut moments = Moments::new(2);
        for x in [1000.0f32, 1000.5, 1001.0, 1000.5] {
            moments.add(&[x, -7.0]);
            moments.add(&[x, f32::NAN]);
            moments.add(&[f32::INFINITY, -7.0]);
            moments.add(&[x, f32::NEG_INFINITY]);
        }
        assert_eq!(moments.finish(), (vec![1000.5, -7.0], vec![0.125, 0.0]));
    }
}
